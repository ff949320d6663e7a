"""States as data: equal states have equal hashes and archives, and no archive leads outside its folder."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.sandbox import tar
from services.sandbox.state import (
    REFUSED,
    archive_hash,
    hash_files,
    hash_folder,
    hash_or_refusal,
    pack,
    pack_or_refusal,
    snapshot_manifest,
    unpack,
)
from services.sandbox.tar import StateLimits, StateRefused

pytestmark = pytest.mark.timeout(60)

NAMES = st.text(alphabet="abcXYZ0 .-_é\n", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
LONG = st.sampled_from(["n" * 99, "n" * 100, "n" * 101, "m" * 255])
PATHS = st.lists(NAMES | LONG, min_size=1, max_size=3).map("/".join)
FILES = st.dictionaries(PATHS, st.binary(max_size=600), max_size=6).filter(
    lambda files: not any(other != path and other.startswith(path + "/") for path in files for other in files)
)
COUNTER = iter(range(10**9))


def fresh(tmp_path: Path) -> Path:
    folder = tmp_path / f"f{next(COUNTER)}"
    folder.mkdir()
    return folder


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        (folder / path).chmod(0o644)
    return folder


def archive(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for info, content in members:
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, linkname, mode
    return info


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=FILES)
def test_a_state_survives_its_archive_and_other_programs_read_it(tmp_path: Path, files: dict[str, bytes]) -> None:
    packed = pack(str(written(fresh(tmp_path), files)))
    copy = fresh(tmp_path)
    assert unpack(packed.tar, str(copy)) == packed.state_hash == hash_files(files) == hash_folder(str(copy))
    assert pack(str(copy)).tar == packed.tar
    assert archive_hash(packed.tar)[0] == packed.state_hash
    with tarfile.open(fileobj=io.BytesIO(packed.tar)) as file:
        read = {info.name: file.extractfile(info) for info in file if info.isfile()}
        assert {name: stream.read() if stream else b"" for name, stream in read.items()} == files


@settings(max_examples=150, deadline=None)
@given(files=FILES.filter(bool), data=st.data())
def test_a_damaged_archive_is_refused_or_is_another_state(files: dict[str, bytes], data: st.DataObject) -> None:
    from services.sandbox.state import entries_of

    good = tar.write(entries_of(files))
    position = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[position] ^= data.draw(st.integers(1, 255))
    try:
        assert archive_hash(bytes(bad))[0] != hash_files(files)
    except StateRefused:
        pass
    for cut in (good[:position], good + b"\0" * 512, good + b"x"):
        with pytest.raises(StateRefused):
            archive_hash(cut)


def test_times_and_owners_do_not_count_but_all_else_does(tmp_path: Path) -> None:
    files = {"a": b"1", "d/b": b"2"}
    base = written(fresh(tmp_path), files)
    reference = pack(str(base))
    os.utime(base / "a", (1, 1))
    (base / "a").chmod(0o600)
    assert pack(str(base)).tar == reference.tar
    seen = {reference.state_hash}
    (base / "a").chmod(0o755)
    seen.add(hash_folder(str(base)))
    (base / "a").write_bytes(b"3")
    seen.add(hash_folder(str(base)))
    (base / "a").rename(base / "c")
    seen.add(hash_folder(str(base)))
    (base / "empty").mkdir()
    seen.add(hash_folder(str(base)))
    (base / "empty").rmdir()
    (base / "empty").symlink_to("c")
    seen.add(hash_folder(str(base)))
    (base / "empty").unlink()
    (base / "empty").symlink_to("d")
    seen.add(hash_folder(str(base)))
    assert len(seen) == 7


def test_links_are_kept_as_text_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_bytes(b"host secret")
    base = fresh(tmp_path)
    (base / "link").symlink_to(outside)
    (base / "folder").symlink_to(tmp_path)
    (base / "long").symlink_to("x" * 300)
    packed = pack(str(base))
    assert b"host secret" not in packed.tar and packed.entries == 3
    copy = fresh(tmp_path)
    unpack(packed.tar, str(copy))
    assert os.readlink(copy / "link") == str(outside) and os.readlink(copy / "long") == "x" * 300
    assert pack(str(copy)).tar == packed.tar


@pytest.mark.parametrize(
    "members",
    [
        [(member("/etc/passwd"), b"x")],
        [(member("../up"), b"x")],
        [(member("a/../../up"), b"x")],
        [(member("./a"), b"x")],
        [(member("a//b"), b"x")],
        [(member("a/b"), b"x")],  # in no folder of the archive
        [(member("l", tarfile.SYMTYPE, "/tmp"), b""), (member("l/owned"), b"x")],
        [(member("l", tarfile.SYMTYPE, "/etc/passwd"), b""), (member("l"), b"x")],
        [(member("a"), b"x"), (member("h", tarfile.LNKTYPE, "a"), b"")],
        [(member("h", tarfile.LNKTYPE, "/etc/passwd"), b"")],
        [(member("d", tarfile.BLKTYPE), b"")],
        [(member("d", tarfile.CHRTYPE), b"")],
        [(member("p", tarfile.FIFOTYPE), b"")],
        [(member("a"), b"x"), (member("a"), b"y")],
        [(member("b"), b"x"), (member("a"), b"y")],
        [(member("a", mode=0o4755), b"x")],
        [(member("a", mode=0o600), b"x")],
    ],
    ids=lambda members: "+".join(f"{info.name}:{info.type.decode()}" for info, _ in members),
)
def test_archives_that_lead_elsewhere_are_refused(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    folder = fresh(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StateRefused):
        unpack(archive(*members), str(folder))
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and folder not in path.parents] == []


def test_extended_headers_are_refused(tmp_path: Path) -> None:
    info = member("a")
    info.pax_headers = {"path": "../evil", "comment": "x"}
    with pytest.raises(StateRefused):
        unpack(archive((info, b"x"), form=tarfile.PAX_FORMAT), str(fresh(tmp_path)))


def test_sizes_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    info = member("a")
    info.size = 7 * 2**30
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(StateRefused) as refusal:
        unpack(header + bytes(1024), str(fresh(tmp_path)))
    assert refusal.value.code == "over_cap"


def test_a_workspace_over_its_caps_has_a_reason_instead_of_a_hash(tmp_path: Path) -> None:
    small = StateLimits(max_entries=10, max_file_bytes=1000, max_total_bytes=2000, max_depth=4, max_path_bytes=50)
    cases = {
        "many": written(fresh(tmp_path), {f"f{number}": b"" for number in range(11)}),
        "large": written(fresh(tmp_path), {"f": bytes(1001)}),
        "total": written(fresh(tmp_path), {f"f{number}": bytes(900) for number in range(3)}),
        "deep": written(fresh(tmp_path), {"a/b/c/d/e": b""}),
        "long": written(fresh(tmp_path), {"n" * 51: b""}),
    }
    sparse = fresh(tmp_path)
    with (sparse / "hole").open("wb") as file:
        file.truncate(2**40)
    for folder in (*cases.values(), sparse):
        assert hash_or_refusal(str(folder), small).startswith(f"{REFUSED}over_cap")
        packed = pack_or_refusal(str(folder), small)
        assert packed.refused.startswith("over_cap") and packed.state_hash == REFUSED + packed.refused
        assert len(packed.tar) == 1024


def test_fifos_and_sockets_are_recorded_and_not_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = written(fresh(tmp_path), {"a": b"1"})
    plain = hash_folder(str(base))
    os.mkfifo(base / "pipe")
    monkeypatch.chdir(base)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")
    packed = pack(str(base))
    assert packed.special == ("pipe", "sock") and packed.state_hash != plain
    with pytest.raises(StateRefused) as refusal:
        unpack(packed.tar, str(fresh(tmp_path)))
    assert refusal.value.code == "special"


def test_names_that_are_no_text_survive(tmp_path: Path) -> None:
    base = fresh(tmp_path)
    with open(os.path.join(os.fsencode(base), b"\xff\xfe\n"), "wb") as file:
        file.write(b"\x00\xff")
    packed, copy = pack(str(base)), fresh(tmp_path)
    assert unpack(packed.tar, str(copy)) == packed.state_hash
    assert os.listdir(os.fsencode(copy)) == [b"\xff\xfe\n"]


def test_file_names_that_clash_or_escape_are_refused() -> None:
    for files in ({"a": b"", "a/b": b""}, {"../a": b""}, {"/a": b""}, {"": b""}, {"a//b": b""}, {"a\0": b""}):
        with pytest.raises(StateRefused):
            hash_files(files)


def test_equal_states_have_equal_snapshot_ids(tmp_path: Path) -> None:
    one, two = (pack(str(written(fresh(tmp_path), {"a": b"1"}))) for _ in range(2))
    assert snapshot_manifest(one, parent="p") == snapshot_manifest(two, parent="p")
    assert snapshot_manifest(one, parent="p").snapshot_id != snapshot_manifest(one, parent="q").snapshot_id
    assert snapshot_manifest(one).entropy.clock == "host"
