"""Grading in a clean room: only a grader that ran to its end gives a reward, and no state fools it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from schemas.task import GraderSpec, Task
from schemas.termination import CENSORED, Termination
from services.sandbox.command import Limits
from services.sandbox.executor import Executor, ExecutorConfig
from services.sandbox.host import HostConfig
from services.sandbox.lanes import LaneBusy
from services.sandbox.state import pack, pack_or_refusal
from services.sandbox.tar import StateLimits
from services.verifier.grading import GradeOutcome, GradingCut, TerminalState, Verifier, VerifierConfig
from tests.sandbox_ground import needs_bwrap, processes_naming, sandbox_root, token, wait_until

pytestmark = [needs_bwrap, pytest.mark.timeout(60)]
TASK = Task(task_id="t", family="f", template="t1", split="train", instruction="make result.txt", files={"given.py": b"1"})
GRADE = b"""
import json, os
text = open("/state/result.txt").read() if os.path.exists("/state/result.txt") else ""
wanted = open("/tests/expected.txt").read()
violations = ["touched"] * (text.count("!"))
print("noise: " + text)
print(json.dumps({"success": text.strip("!") == wanted, "components": {"length": len(text)}, "violations": violations}))
"""
PYTHON = ("python3", "-I", "-S")


def grader(code: bytes = GRADE, timeout_s: float = 10.0) -> GraderSpec:
    return GraderSpec(
        files={"grade.py": code, "expected.txt": b"good"}, command=(*PYTHON, "/tests/grade.py"), timeout_s=timeout_s
    )


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with sandbox_root() as folder:
        yield folder


@pytest.fixture
async def verifier(root: str) -> AsyncIterator[Verifier]:
    limits = Limits(memory_bytes=128 * 2**20, processes=30)
    config = VerifierConfig(host=HostConfig(root=root, threads=8), concurrency=2, limits=limits)
    opened = await Verifier.start(config)
    yield opened
    await opened.close()


def sealed(folder: Path) -> TerminalState:
    packed = pack(str(folder))
    return TerminalState(state_hash=packed.state_hash, tar_digest=packed.tar_digest, archive=packed.tar)


def state(tmp_path: Path, result: str = "good") -> TerminalState:
    (tmp_path / "result.txt").write_text(result)
    return sealed(tmp_path)


async def judge(
    verifier: Verifier, terminal: TerminalState | None, spec: GraderSpec | None = None, task: Task = TASK
) -> GradeOutcome:
    return await verifier.grade(terminal, spec or grader(), task, termination=Termination.AGENT_FINISH, counts={"turns": 3})


async def test_success_failure_and_violations(verifier: Verifier, tmp_path: Path) -> None:
    good = await judge(verifier, state(tmp_path))
    assert (good.status, good.success, good.reward, good.violations) == ("graded", True, 1.0, ())
    assert good.components == {"length": 4.0, "count.turns": 3.0, "count.entries": 1.0, "count.bytes": 4.0, "tamper": 0.0}
    bad = await judge(verifier, state(tmp_path, "wrong"))
    assert (bad.status, bad.success, bad.reward) == ("graded", False, 0.0)
    costly = await judge(verifier, state(tmp_path, "!good!"))
    assert (costly.success, costly.reward, costly.violations) == (True, 0.0, ("touched", "touched"))
    assert costly.components["cost.touched"] == 2.0 and costly.state_hash == state(tmp_path, "!good!").state_hash


@pytest.mark.parametrize("termination", sorted(CENSORED))
async def test_the_censored_have_no_reward_and_no_grading(verifier: Verifier, tmp_path: Path, termination: Termination) -> None:
    outcome = await verifier.grade(state(tmp_path), grader(b"raise SystemExit(9)"), TASK, termination=termination)
    assert (outcome.status, outcome.reward, outcome.success) == ("censored", None, None)


BROKEN = {
    "crash": b"raise RuntimeError('secret detail')",
    "exit code": b'print(\'{"success": true, "components": {}, "violations": []}\'); raise SystemExit(1)',
    "no output": b"",
    "blank last line": b'print(\'{"success": true, "components": {}, "violations": []}\'); print(); print(\' \')',
    "no json": b"print('success')",
    "wrong type": b'print(\'{"success": 1, "components": {}, "violations": []}\')',
    "text number": b'print(\'{"success": true, "components": {"a": "1"}, "violations": []}\')',
    "nan": b'print(\'{"success": true, "components": {"a": NaN}, "violations": []}\')',
    "too large": b'print(\'{"success": true, "components": {"a": 1e999}, "violations": []}\')',
    "missing field": b'print(\'{"success": true, "components": {}}\')',
    "unknown field": b'print(\'{"success": true, "components": {}, "violations": [], "reward": 1}\')',
    "too many names": b"import json; print(json.dumps({'success': True, 'components': {}, 'violations': ['v'] * 99}))",
    "no text": b'import sys; sys.stdout.buffer.write(b\'{"success": true, "components": {}, "violations": ["\\xff"]}\')',
    "killed": b"import os; os.kill(os.getpid(), 9)",
    "memory": b"x = bytearray(2**31)",
    "missing file": b"open('/tests/none')",
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_grader_is_never_a_reward(verifier: Verifier, tmp_path: Path, code: bytes) -> None:
    outcome = await judge(verifier, state(tmp_path), grader(code))
    assert (outcome.status, outcome.reward, outcome.success) == ("verifier_error", None, None)
    assert outcome.detail


async def test_a_hanging_or_flooding_grader_is_cut_off(verifier: Verifier, tmp_path: Path) -> None:
    word = token()
    hang = f"import subprocess, time\nsubprocess.Popen(['sh', '-c', 'sleep 60; : {word}'])\ntime.sleep(60)".encode()
    outcome = await judge(verifier, state(tmp_path), grader(hang, timeout_s=0.6))
    assert outcome.status == "verifier_error" and "timed_out" in outcome.detail and processes_naming(word) == []
    flood = b"import os\nfor _ in range(4000): os.write(1, b'x' * 65536)\nos.write(1, b'\\n')\n" + GRADE
    flooded = await judge(verifier, state(tmp_path), grader(flood))
    assert flooded.status == "graded" and flooded.success  # the last line is always kept


async def test_no_state_or_no_command_is_an_error(verifier: Verifier, tmp_path: Path) -> None:
    assert (await judge(verifier, None)).status == "verifier_error"
    for command in ((), ("no-such-program",), ("echo", "\0")):
        spec = msgspec.structs.replace(grader(), command=command)
        assert (await judge(verifier, state(tmp_path), spec)).status == "verifier_error"
    escaping = msgspec.structs.replace(grader(), files={"../x": b""})
    assert (await judge(verifier, state(tmp_path), escaping)).status == "verifier_error"


async def test_the_grader_sees_the_sealed_state_and_nothing_else(verifier: Verifier, tmp_path: Path, root: str) -> None:
    look = f"""
import json, os, socket
def writable(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
problems = [path for path in ("/state/x", "/state/result.txt", "/tests/x", "/usr/x", "/x", "/work/x") if writable(path)]
problems += [path for path in ({root!r}, "/root/.", "/home/.", {str(tmp_path)!r}) if os.path.exists(path)]
problems += [name for name in os.listdir("/state") if name != "result.txt"] + [name for name in os.listdir("/tests") if name not in ("grade.py", "expected.txt")]
if os.readlink("/work") != "/state" or os.getcwd() != "/tests" or os.getuid() != 1000: problems.append("place")
if sum(name.isdigit() for name in os.listdir("/proc")) > 3: problems.append("processes")
try:
    socket.create_connection(("127.0.0.1", 1), timeout=1)
except ConnectionRefusedError:
    pass
problems += [line for line in open("/proc/net/dev").read().splitlines()[2:] if not line.strip().startswith("lo")]
print(json.dumps({{"success": not problems, "components": {{}}, "violations": problems}}))
"""  # noqa: E501
    outcome = await judge(verifier, state(tmp_path), grader(look.encode()))
    assert (outcome.status, outcome.violations, outcome.reward) == ("graded", (), 1.0)


async def test_gradings_run_side_by_side_and_apart(verifier: Verifier, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(6)]
    for folder in folders:
        folder.mkdir()
    states = [state(folder, "good" if number % 2 else "bad") for number, folder in enumerate(folders)]
    outcomes = await asyncio.gather(*(judge(verifier, terminal) for terminal in states))
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0] * 3
    assert os.listdir(os.path.join(root_of(verifier), "scratch")) == []


def root_of(verifier: Verifier) -> str:
    return verifier._host.live


async def test_a_full_verifier_hands_the_episode_back(root: str, tmp_path: Path) -> None:
    config = VerifierConfig(host=HostConfig(root=root), concurrency=1, queue_bound=1)
    verifier = await Verifier.start(config)
    try:
        slow = grader(b"import time; time.sleep(0.5)\n" + GRADE)
        running = [asyncio.create_task(judge(verifier, state(tmp_path), slow)) for _ in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(LaneBusy):
            await judge(verifier, state(tmp_path))
        assert [outcome.reward for outcome in await asyncio.gather(*running)] == [1.0, 1.0]
    finally:
        await verifier.close()


async def assert_tampered(verifier: Verifier, terminal: TerminalState, word: str, task: Task = TASK) -> None:
    outcome = await judge(verifier, terminal, task=task)
    assert (outcome.status, outcome.reward, outcome.success) == ("tampered", None, None), outcome
    assert word in outcome.detail and outcome.components["tamper"] == 1.0 and outcome.tampering


async def test_a_swapped_archive_is_tampering(verifier: Verifier, tmp_path: Path) -> None:
    good, other = state(tmp_path), state(tmp_path, "other")
    await assert_tampered(verifier, msgspec.structs.replace(other, archive=good.archive), "digest")
    forged = TerminalState(state_hash=other.state_hash, tar_digest=good.tar_digest, archive=good.archive)
    await assert_tampered(verifier, forged, "not the one that was sealed")
    cut = good.archive[:-512]
    await assert_tampered(
        verifier, TerminalState(state_hash="x", tar_digest=hashlib.sha256(cut).hexdigest(), archive=cut), "malformed"
    )


@pytest.mark.parametrize(
    ("name", "target", "place"),
    [
        ("result.txt", "/tests/expected.txt", "/tests/expected.txt"),
        ("result.txt", "../tests/expected.txt", "/tests/expected.txt"),
        ("result.txt", "/work/../tests/expected.txt", "/tests/expected.txt"),
        ("all", "/", "/"),
        ("up", "..", "/"),
        ("mem", "/proc/self/mem", "/proc/self/mem"),
        ("zero", "/dev/zero", "/dev/zero"),
        ("far", "/usr/share/../../tests", "cannot be told"),
    ],
)
async def test_links_to_the_graders_places_are_tampering(
    verifier: Verifier, tmp_path: Path, name: str, target: str, place: str
) -> None:
    (tmp_path / name).symlink_to(target)
    await assert_tampered(verifier, sealed(tmp_path), place)


async def test_links_through_links_are_followed(verifier: Verifier, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "here").symlink_to("..")
    (tmp_path / "result.txt").symlink_to("d/here/../tests/expected.txt")
    await assert_tampered(verifier, sealed(tmp_path), "/tests/expected.txt")


async def test_honest_links_are_graded(verifier: Verifier, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("good")
    (tmp_path / "result.txt").symlink_to("/work/real")
    for name, target in {
        "py": "/usr/bin/python3",
        "out": "/dev/null",
        "loop": "loop",
        "gone": "nowhere",
        "tmp": "/tmp/x",
    }.items():
        (tmp_path / name).symlink_to(target)
    assert (await judge(verifier, sealed(tmp_path))).reward == 1.0


@pytest.mark.parametrize("name", ["grade.py", "tests/expected.txt", "expected.txt", "a/conftest.py", "sitecustomize.py"])
async def test_names_that_catch_a_grader_are_tampering(verifier: Verifier, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("good")
    await assert_tampered(verifier, sealed(tmp_path), name)
    honest = msgspec.structs.replace(TASK, files={name: b""})
    assert (await judge(verifier, sealed(tmp_path), task=honest)).status == "graded"
    told = msgspec.structs.replace(TASK, instruction="write expected.txt")
    assert (await judge(verifier, sealed(tmp_path), task=told)).status == ("graded" if name == "expected.txt" else "tampered")


async def test_special_files_and_states_over_their_caps_are_tampering(verifier: Verifier, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "result.txt")
    await assert_tampered(verifier, sealed(tmp_path), "special file 'result.txt'")
    os.remove(tmp_path / "result.txt")
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"")
    refused = pack_or_refusal(str(tmp_path), StateLimits(max_entries=5))
    terminal = TerminalState(state_hash=refused.state_hash, tar_digest=refused.tar_digest, archive=refused.tar)
    await assert_tampered(verifier, terminal, "could not be sealed: over_cap")


async def test_an_agents_traps_do_not_reach_the_grader(verifier: Verifier, tmp_path: Path) -> None:
    """Modules beside the state that shadow the grader's imports are not loaded."""
    (tmp_path / "json.py").write_text("raise SystemExit(0)")
    assert (await judge(verifier, state(tmp_path))).reward == 1.0


async def test_a_stopping_verifier_cuts_its_graders_off_and_judges_nothing(root: str, tmp_path: Path) -> None:
    word = token()
    config = VerifierConfig(host=HostConfig(root=f"{root}/stopping", threads=8), concurrency=1, limits=Limits(processes=30))
    verifier = await Verifier.start(config)
    command = ("python3", "-c", f"import time; time.sleep(60)  # {word}")
    spec = msgspec.structs.replace(grader(timeout_s=60), command=command)
    terminal = state(tmp_path)
    running, waiting = (asyncio.create_task(judge(verifier, terminal, spec)) for _ in range(2))
    await asyncio.to_thread(wait_until, lambda: bool(processes_naming(word)), "the grader runs")
    verifier.halt()
    for cut_off in (running, waiting):
        with pytest.raises(GradingCut):
            await cut_off
    await verifier.close()
    assert processes_naming(word) == []


async def test_from_reset_to_verdict(verifier: Verifier) -> None:
    """The oracle's commands earn the reward and doing nothing does not, over real sandboxes and the example's own graders."""
    from examples.terminal import suite

    with sandbox_root() as root:
        executor = await Executor.start(ExecutorConfig(host=HostConfig(root=root, threads=8)))
        try:
            for task_id in suite.task_ids("train")[:3]:
                task = suite.task(task_id)
                for name, commands in (("oracle", suite.oracle(task_id)), ("idle", ())):
                    sandbox = f"{task_id}-{name}"
                    await executor.reset(sandbox, task.files)
                    for number, command in enumerate(commands):
                        assert (await executor.run(sandbox, f"c{number}", command)).exit_code == 0
                    packed = await executor.export(sandbox)
                    terminal = TerminalState(state_hash=packed.state_hash, tar_digest=packed.tar_digest, archive=packed.tar)
                    outcome = await judge(verifier, terminal, suite.grader(task_id), task)
                    assert (outcome.status, outcome.reward) == ("graded", 1.0 if name == "oracle" else 0.0), outcome
        finally:
            await executor.close()


def test_graded_components_cannot_forge_costs() -> None:
    from services.verifier.reward import RewardRule, reward_of, reward_vector

    vector = reward_vector({"cost.x": 5, "tamper": 1, "ok": 2}, ["x", "x"], {"turns": 1}, tampered=False)
    assert vector == {"grader.cost.x": 5, "grader.tamper": 1, "ok": 2, "cost.x": 2, "count.turns": 1, "tamper": 0}
    assert json.dumps(vector)
    assert reward_of(True, ["v"], RewardRule(violations_void_success=False)) == 1.0
    assert (reward_of(True, []), reward_of(True, ["v"]), reward_of(False, [])) == (1.0, 0.0, 0.0)
