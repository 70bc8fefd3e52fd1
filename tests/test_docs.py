"""Every block of code in the README and the pages is run, every link leads somewhere, every page is on the site."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sdm_jax
import sdm_jax.flax
from sdm_jax.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "cuda" / "README.md", *sorted((ROOT / "notebooks").glob("*.md"))]
_BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NO_CODE = ("", "{toctree}", "{eval-rst}")  # formulas; directives of the site


def blocks(page, language):
    return [code for found, code in _BLOCK.findall(page.read_text()) if found == language]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks(page):
    """In order, in one namespace: a page may build on its earlier blocks."""
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    for code in blocks(page, "python"):
        line = text[: text.index(code)].count("\n")
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_no_other_blocks():
    for page in PAGES:
        languages = {language for language, _ in _BLOCK.findall(page.read_text())}
        assert languages <= {"python", "bash", *_NO_CODE}, page


def shell_commands():
    return [(page, line) for page in PAGES for code in blocks(page, "bash") for line in code.splitlines() if line]


def test_shell_commands_are_the_expected_ones():
    """Each is run: the installations and the tests by .ci/run, the rest below and in test_bench and test_wheel."""
    for page, line in shell_commands():
        for part in line.split(" && "):
            known = (
                r"python3 -m venv|\.venv/bin/pip install -e|\S*python -m (sdm_jax|pytest|sphinx|build|cibuildwheel) ?"
            )
            assert re.match(rf"(SDM_\w+=\S+ )*({known})", part), f"{name(page)}: {part}"


def test_the_training_command(tmp_path, capfd):
    """The README's command, with fewer steps and a folder of its own."""
    commands = [part for _, line in shell_commands() for part in line.split(" && ") if "sdm_jax train" in part]
    assert commands
    few = ["--steps", "2", "--validation-tokens", "2048", "--sample-length", "8", "--out", str(tmp_path / "run")]
    for command in commands:
        words = command.split()
        assert words[:3] == [".venv/bin/python", "-m", "sdm_jax"]
        assert main([*words[3:], *few]) == 0
        assert "bits per byte" in capfd.readouterr().out


def test_commands_that_tables_name():
    """`python -m sdm_jax COMMAND --flag` in the text: the command has the flags."""
    text = "\n".join(page.read_text() for page in PAGES)
    commands = set(re.findall(r"python -m sdm_jax (\w+)", text))
    assert commands >= {"train", "bench", "info"}
    readme = (ROOT / "README.md").read_text()
    for command, meaning in re.findall(r"^\| `(train|generate|bench|info)[^|]*\| (.*) \|$", readme, re.MULTILINE):
        usage = subprocess.run(
            [sys.executable, "-m", "sdm_jax", command, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for flag in re.findall(r"`(--[a-z-]+)", meaning):
            assert flag in usage, f"{command} has no {flag}"


def test_the_ci_runs_the_test_command():
    readme = (ROOT / "README.md").read_text()
    first = next(line for line in readme.splitlines() if "pytest" in line)
    assert [line for _, line in shell_commands() if line == first], "the first line with pytest is the command"
    assert "grep -m 1 'pytest' README.md" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_files_that_pages_name():
    for page in PAGES:
        for path in re.findall(r"`((?:sdm_jax|ffi|cuda|tests|notebooks)/[\w./]*[\w/])`", page.read_text()):
            assert (ROOT / path).exists(), f"{name(page)} names {path}"


def test_every_page_is_on_the_site():
    index = (ROOT / "notebooks" / "index.md").read_text()
    listed = {line for block in blocks(ROOT / "notebooks" / "index.md", "{toctree}") for line in block.split()}
    pages = {path.stem for path in (ROOT / "notebooks").iterdir() if path.suffix in (".md", ".ipynb")}
    assert pages - {"index"} <= listed, index


def test_docstrings_name_real_functions():
    """A function that the text of a page calls `sdm_jax.something` exists."""
    for page in PAGES:
        for path in set(re.findall(r"`sdm_jax\.([\w.]+)[`(]", page.read_text())):
            code = f"import sdm_jax, sdm_jax.flax.statistics; sdm_jax.{path}"
            exec(textwrap.dedent(code), {})


def test_the_site_builds(tmp_path):
    """By the README's command, every warning an error."""
    (command,) = [line for _, line in shell_commands() if "sphinx" in line]
    words = [str(tmp_path / "site") if word == "build/site" else word for word in command.split()[1:]]
    done = subprocess.run(
        [sys.executable, *words, "-q", "-W"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(Path(sdm_jax.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "api.html").read_text()
    for module in (sdm_jax, sdm_jax.kernels, sdm_jax.flax):
        for public in module.__all__:
            full = f"{module.__name__}.{public}"
            assert f'id="{full}"' in page or f'id="module-{full}"' in page, full
