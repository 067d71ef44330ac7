"""The scripts run for a user whom the machine does not know: `docker run --user 1234` makes one."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.small_workloads import jsonl

# isort: split
# after the harness, which decides how triton (imported by these) will run
from tests.token_cache_test import tokenizer_of

HERE = Path(__file__).parents[1]  # the project's folder
NOBODY = "12345"  # has no line in /etc/passwd
UNKNOWN = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
# may read what only root may, because Python may be installed there
UNKNOWN += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", sys.executable]
SMALL = ["--dtype", "fp32", "--seq-len", "8", "--steps", "1"]


@pytest.fixture
def folder(saved_tiny):
    """A folder for everybody, with a model, its tokenizer and data; and one for what is written."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(saved_tiny, folder, dirs_exist_ok=True)
        tokenizer_of("a b c d e").save_pretrained(folder)
        jsonl(folder / "data.jsonl", ("a b", "c d e"), ("a", "b"), ("c c", "e e"))
        (folder / "tmp").mkdir()
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777)
        yield folder


def as_nobody(folder: Path, home: str | None, *words: str) -> subprocess.CompletedProcess:
    """Run Python as a user without a name, in `folder`, where only that user's files may appear."""
    variables = {"PATH": os.environ["PATH"], "TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": "1"}
    variables |= {"OMP_NUM_THREADS": "1"} | ({} if home is None else {"HOME": home})
    return subprocess.run(
        [*UNKNOWN, *words], cwd=folder, env=variables, capture_output=True, text=True
    )


@pytest.fixture(autouse=True)
def can_be_nobody(folder):
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, by setpriv")
    tried = as_nobody(folder, "/", "-c", f"import numpy; open({str(HERE / 'Makefile')!r})")
    if tried.returncode != 0:
        pytest.skip(f"other users cannot run this Python: {tried.stderr.strip()}")


RARELY = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "home", [pytest.param(None, marks=RARELY), "/", pytest.param("/dev/null", marks=RARELY)]
)
def test_a_user_without_a_home_trains_and_keeps_tokens(folder, home):
    script, data = str(HERE / "finetune_baseline.py"), str(folder / "data.jsonl")
    before = set(os.listdir(folder))
    run = as_nobody(folder, home, script, "--model", str(folder), "--data", data, *SMALL)
    assert run.returncode == 0, run.stderr
    assert "damaged" not in run.stdout and "not kept" not in run.stdout
    assert set(os.listdir(folder)) == before, "a folder named ~ where the script was started"
    assert list((folder / "tmp").rglob("kernel-dev-ft/*.npz"))


def test_a_user_without_a_home_gets_a_sentence_for_a_model_that_is_not_there(folder):
    run = as_nobody(folder, None, str(HERE / "finetune_baseline.py"), "--model", "some/model")
    assert run.returncode == 2 and run.stderr.startswith("error: there is no directory some/model")


def home_of_nobody(folder: Path, home: str | None) -> tuple[str, str, str]:
    """As libraries ask for them: the home, where Triton keeps kernels, the user's name."""
    asked = f"import sys; sys.path.insert(0, {str(HERE)!r}); import harness, getpass, os, pathlib; "
    asked += "print(pathlib.Path.home(), os.environ['TRITON_CACHE_DIR'], getpass.getuser())"
    said = as_nobody(folder, home, "-c", asked)
    assert said.returncode == 0, said.stderr
    return tuple(said.stdout.split())


def test_libraries_find_a_name_and_places_for_their_caches(folder):
    home, triton, name = home_of_nobody(folder, None)
    assert home == str(folder / "tmp" / f"kernel-dev-ft-{NOBODY}") and triton.startswith(home)
    assert Path(home).stat().st_mode & 0o777 == 0o700 and name == NOBODY


def test_a_home_that_holds_models_stays_the_home_where_nothing_can_be_written(folder):
    (folder / "home" / ".cache").mkdir(parents=True)
    home, triton, _ = home_of_nobody(folder, str(folder / "home"))
    assert home == str(folder / "home") and triton.startswith(str(folder / "tmp"))


def test_the_folder_of_another_user_is_no_home(folder):
    """In it could lie code that PyTorch or Triton would load."""
    others = folder / "tmp" / f"kernel-dev-ft-{NOBODY}"
    others.mkdir()
    others.chmod(0o777)
    home, _, _ = home_of_nobody(folder, None)
    assert home.startswith(str(folder / "tmp")) and home != str(others)
