"""The package imports the same way from the repository, from an editable install and from a wheel."""

import ast
import importlib.machinery
import os
import pydoc
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import specdec_fast

ROOT = Path(__file__).parent.parent
REPORT = "import specdec_fast, specdec_fast.kernels as k; print(specdec_fast.__file__, *k.__path__, sep='\\n')"


def python(*arguments, cwd, **variables):
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment = inherited | {"SPECDEC_FAST_BUILD": "none"} | variables
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_from(site_folder, cwd):
    """Paths of the package and its kernels with ``site_folder`` ahead of this environment."""
    # -S: this environment may itself hold an editable install, whose import hook would win
    setup = (
        f"import site, sys; site.addsitedir({str(site_folder)!r}); sys.path.append({sysconfig.get_path('purelib')!r})"
    )
    return [Path(line) for line in python("-I", "-S", "-c", f"{setup}; {REPORT}", cwd=cwd).splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A clean copy, so that nothing is built inside the repository."""
    copy = tmp_path_factory.mktemp("build") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("specdec_fast", "kernels", "csrc"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def build(checkout, folder, kind, **variables):
    """Build a wheel of ``kind`` and unpack it into ``folder / "site"``."""
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    python("-c", script, cwd=checkout, **variables)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_kernels_from_the_repository_root():
    package, kernels = map(Path, python("-c", REPORT, cwd=ROOT).splitlines())
    assert package == ROOT / "specdec_fast" / "__init__.py"
    assert kernels.resolve() == ROOT / "kernels"


def test_kernels_from_an_editable_install(checkout, tmp_path):
    package, kernels = imported_from(build(checkout, tmp_path, "editable"), tmp_path)
    assert package == checkout / "specdec_fast" / "__init__.py"
    assert kernels.resolve() == checkout / "kernels"


def test_wheel_is_complete(checkout, tmp_path):
    site = build(checkout, tmp_path, "wheel")
    package, kernels = imported_from(site, tmp_path)
    assert package == site / "specdec_fast" / "__init__.py"
    assert kernels == site / "specdec_fast" / "kernels"
    sources = {p.relative_to(checkout) for p in (checkout / "specdec_fast").rglob("*.py")}
    sources |= {Path("specdec_fast") / p.relative_to(checkout) for p in (checkout / "kernels").rglob("*.py")}
    assert {p.relative_to(site) for p in site.rglob("*.py")} == sources
    for data in ("py.typed", "audit/report.html.jinja"):
        assert (site / "specdec_fast" / data).exists()
    assert not (site / "kernels").exists()
    assert (site / "specdec_fast" / "_C.missing").read_text() == "SPECDEC_FAST_BUILD=none"


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such", "there is no C++ compiler (no-such)"), ("false", "they did not compile; `pip install -v` shows why")],
)
def test_a_build_that_falls_back_leaves_word_of_why(checkout, tmp_path, compiler, reason):
    site = build(checkout, tmp_path, "wheel", SPECDEC_FAST_BUILD="auto", CXX=compiler)
    (note,) = site.rglob("_C.missing")
    assert note.read_text() == reason
    assert not list(site.rglob("*.so"))


def tracked():
    """Paths that git holds; none outside of a git checkout."""
    if shutil.which("git") is None:
        return []
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def test_the_sdist_holds_what_git_holds(tmp_path):
    paths = tracked()
    if not paths:
        pytest.skip("not a git checkout")
    for path in paths:
        (tmp_path / "checkout" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / "checkout" / path, follow_symlinks=False)
    python("-c", "from setuptools import build_meta; build_meta.build_sdist('..')", cwd=tmp_path / "checkout")
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    made = {"PKG-INFO", "setup.cfg", *(path for path in held if path.startswith("specdec_fast.egg-info/"))}
    assert held - made == set(paths)


@pytest.mark.parametrize("name", ["kernels", "benchmarks"])
def test_folders_do_not_shadow_packages_of_that_name(name, tmp_path):
    assert not (ROOT / name / "__init__.py").exists()
    installed = tmp_path / name / "__init__.py"
    installed.parent.mkdir()
    installed.touch()
    spec = importlib.machinery.PathFinder.find_spec(name, [str(ROOT), str(tmp_path)])
    assert spec is not None
    assert spec.origin == str(installed)


def test_runs_as_a_module():
    assert "generate" in python("-m", "specdec_fast", "--help", cwd=ROOT)


PUBLIC_MODULES = {"audit", "drafters", "errors", "hf", "models", "ops", "reference"}


def test_dir_shows_the_public_names_and_no_others():
    names = {name for name in dir(specdec_fast) if not name.startswith("_")}
    assert names == {*specdec_fast.__all__} - {"__version__"}
    assert names >= {"EQSpec", "EXSpec", "realign_cache", *PUBLIC_MODULES}


def test_help_lists_the_public_names():
    shown = pydoc.render_doc(specdec_fast, renderer=pydoc.plaintext)
    listed = {line.strip().removeprefix("class ").split("(")[0] for line in shown.splitlines()}
    assert listed >= {*specdec_fast.__all__} - {"__version__", *PUBLIC_MODULES}
    assert all(f"    {name}\n" in shown or f"    {name} (package)\n" in shown for name in PUBLIC_MODULES)


def test_a_public_module_needs_no_import_of_its_own():
    # an attribute may be there already, through another test's import
    for name in PUBLIC_MODULES:
        assert specdec_fast.__getattr__(name).__name__ == f"specdec_fast.{name}"


def test_importing_the_package_loads_no_framework():
    heavy = "sorted({'torch', 'transformers'} & set(sys.modules))"
    assert python("-c", f"import sys, specdec_fast; dir(specdec_fast); print({heavy})", cwd=ROOT) == "[]\n"


def test_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == specdec_fast.__version__


QUESTION = re.compile(r"(What|Which|Where|How|Whether|Who|When|Why)\b")


def docstrings(path):
    """Names and docstrings of the module at ``path``, its classes and its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "name", "module"), ast.get_docstring(node) or ""


def test_a_docstring_names_the_thing_or_says_what_it_does():
    sources = {path for folder in ("specdec_fast", "kernels", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    paths = sorted(path.relative_to(ROOT).as_posix() for path in sources)
    assert {path.partition("/")[0] for path in paths} == {"specdec_fast", "kernels", "benchmarks"}
    assert not [
        f"{path}: {name}: {text}" for path in paths for name, text in docstrings(ROOT / path) if QUESTION.match(text)
    ]


# folder or file: what it must not import
IMPORT_RULES = {
    "ops.py": {"transformers"},
    "reference.py": {"transformers"},
    "operators": {"transformers"},
    "scheduler": {"transformers", "torch"},
    "prompts": {"transformers", "torch"},
    "layouts": {"decoding", "exspec", "drafters", "audit", "cli"},
    "decoding": {"exspec", "audit", "cli"},
    "exspec": {"audit", "cli"},
    "drafters": {"exspec", "audit", "cli"},
    "audit": {"cli"},
}


def imported(path):
    """Names that a module of the package imports when it is loaded: other packages, and the package's own folders."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = [*base, *(node.module or "").split(".")]
            yield parts[1] if node.level and len(parts) > 1 and parts[1] else parts[0]
            if node.level and parts in (["specdec_fast", ""], ["specdec_fast"]):
                yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("where", IMPORT_RULES)
def test_import_rules(where):
    place = ROOT / "specdec_fast" / where
    files = [place] if place.suffix else sorted(place.rglob("*.py"))
    assert files and all(set(imported(file)) for file in files if file.name != "__init__.py")
    broken = {file.name: found for file in files if (found := set(imported(file)) & IMPORT_RULES[where])}
    assert not broken


def test_kernels_include_no_torch_header():
    assert not [path for path in (ROOT / "csrc/cuda").glob("*.cuh") if "<torch" in path.read_text()]


def test_every_path_of_the_map_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.[a-z]+|/))`", text)) - {".ci/run"}
    roots = [ROOT, ROOT / "specdec_fast", ROOT / "csrc/cuda", *(ROOT / "tests", ROOT / "specdec_fast/integrations")]
    assert len(named) > 30
    assert not [name for name in named if not any((root / name).exists() for root in roots)]
