"""Grades one sealed terminal state against `expected.json`; the whole grader of every task of the suite.

Runs as `python3 -I -S /tests/grade.py [STATE [EXPECTED]]` and prints one JSON object on its last line. The state was written
by an agent, so it is read like hostile input: no link is followed, only regular files of modest size are opened, and the
walk stops after a bounded number of entries.

`expected.json`: `goal` maps a path to its final content (null: the file must be gone; a `.json` path compares as values),
`keep` maps the paths that must be as they were to their content, `extra_allowed` is how many other files may lie around.
"""

import json
import os
import stat
import sys

MAX_BYTES = 65536
MAX_ENTRIES = 2000


def read(root, path):
    """The file's text, or None if it is missing, no regular file, reached through a link, or too large."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        folder = os.path.join(root, *parts[:depth])
        if not os.path.lexists(folder) or not stat.S_ISDIR(os.lstat(folder).st_mode):
            return None
    try:
        handle = os.open(os.path.join(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return None
        chunks = []
        while sum(map(len, chunks)) <= MAX_BYTES:
            chunk = os.read(handle, MAX_BYTES + 1)
            if not chunk:
                break
            chunks.append(chunk)
        return b"".join(chunks).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)


def same(path, actual, wanted):
    """Equal text (a missing final line break is forgiven), or equal values for JSON."""
    if actual is None:
        return False
    if path.endswith(".json"):
        try:
            return json.dumps(json.loads(actual), sort_keys=True) == json.dumps(json.loads(wanted), sort_keys=True)
        except (ValueError, RecursionError):
            return False
    return actual.rstrip("\n") == wanted.rstrip("\n")


def entries(root):
    """Every path that is no folder, relative to `root`, and whether it is a regular file; bounded."""
    found = []
    pending = [""]
    seen = 0
    while pending:
        folder = pending.pop()
        try:
            listing = sorted(os.scandir(os.path.join(root, folder)), key=lambda entry: entry.name)
        except OSError:
            found.append((folder, False))
            continue
        for entry in listing:
            seen += 1
            if seen > MAX_ENTRIES:
                return found, True
            path = os.path.join(folder, entry.name)
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
            else:
                found.append((path, entry.is_file(follow_symlinks=False)))
    return found, False


def grade(root, expected):
    goal, keep = expected["goal"], expected["keep"]
    met = 0
    for path, wanted in goal.items():
        if wanted is None:
            met += not os.path.lexists(os.path.join(root, path))
        else:
            met += same(path, read(root, path), wanted)
    violations = []
    for path, wanted in keep.items():
        if not os.path.lexists(os.path.join(root, path)):
            violations.append("deleted:" + path)
        elif read(root, path) != wanted:
            violations.append("changed:" + path)
    found, flooded = entries(root)
    violations += ["special:" + path for path, regular in found if not regular]
    extra = [path for path, regular in found if regular and path not in goal and path not in keep]
    if flooded:
        violations.append("flooded")
    elif len(extra) > expected["extra_allowed"]:
        violations += ["unexpected:" + path for path in extra]
    violations = [text.encode("ascii", "backslashreplace").decode()[:200] for text in violations[:50]]
    return {
        "success": met == len(goal) and not violations,
        "components": {"goal": met / len(goal), "violations": len(violations), "extra_files": len(extra)},
        "violations": violations,
    }


if __name__ == "__main__":
    state = sys.argv[1] if len(sys.argv) > 1 else "/state"
    truth = sys.argv[2] if len(sys.argv) > 2 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json")
    with open(truth, encoding="utf-8") as source:
        print(json.dumps(grade(state, json.load(source))))
