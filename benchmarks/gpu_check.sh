#!/usr/bin/env bash
# All that needs a GPU, in under 8 minutes: the tests marked `gpu`, then the realign benchmark.
# Usage: benchmarks/gpu_check.sh [FILE.json], with the package installed and built for CUDA; PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
output=$(realpath -m "${1:-gpu_check.json}")
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check: torch sees no GPU" >&2
  exit 2
fi
timeout 270 "$python" -m pytest -m gpu --junitxml="$work/tests.xml"
tests=$?
timeout 180 "$python" -m benchmarks.realign --quick --device cuda --json "$work/realign.json"
benchmark=$?

"$python" - "$work" "$output" "$tests" "$benchmark" <<'PYTHON'
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch

work, output, (tests, benchmark) = Path(sys.argv[1]), Path(sys.argv[2]), map(int, sys.argv[3:])
report = {
    "device": torch.cuda.get_device_name(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "exit_codes": {"tests": tests, "benchmark": benchmark},
}
if (work / "tests.xml").exists():
    suite = ElementTree.parse(work / "tests.xml").getroot().find("testsuite")
    report["tests"] = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped", "time")}
if (work / "realign.json").exists():
    report["realign"] = json.loads((work / "realign.json").read_text())
output.write_text(json.dumps(report, indent=1) + "\n")
print(f"wrote {output}")
PYTHON
report=$?
exit $((tests || benchmark || report))
