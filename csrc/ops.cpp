#include "common.h"

#define SCHEMA(...) m.def(#__VA_ARGS__);

STABLE_TORCH_LIBRARY(specdec_fast, m) {
#include "../specdec_fast/schemas.inc"
}
