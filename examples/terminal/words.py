"""The word pools that task instances are drawn from.

The pools are small on purpose: a policy of under two million parameters learns to copy a name only when each word of it has
been met many times in many places. No word may be a part of another one, because oracles use plain `grep` and `sed`.
"""

from __future__ import annotations

FOLDERS: tuple[str, ...] = (
    "data", "docs", "notes", "logs", "conf", "src", "lib", "work", "inbox", "site", "data/raw", "src/app",
)  # fmt: skip
ARCHIVES: tuple[str, ...] = ("old", "done", "safe", "past", "vault")
EXTENSIONS: tuple[str, ...] = ("txt", "md", "log", "csv", "cfg", "dat")
SEPARATORS: tuple[str, ...] = ("-", "_", ".", "")

STEMS: tuple[str, ...] = (
    "report", "plan", "budget", "index", "draft", "memo", "roster", "menu", "recipe", "letter", "agenda", "ledger", "survey",
    "ticket", "guide", "sketch", "profile", "sample", "chart", "story",
)  # fmt: skip
VALUES: tuple[str, ...] = (
    "red", "green", "blue", "amber", "apple", "pear", "plum", "lemon", "tiger", "otter", "eagle", "whale", "iron", "copper",
    "river", "winter",
)  # fmt: skip
NUMBERS: tuple[int, ...] = tuple(range(10, 100, 5))
KEYS: tuple[str, ...] = ("port", "limit", "depth", "width", "height", "speed", "delay", "volume")
FIELDS: tuple[str, ...] = ("owner", "author", "title", "city", "country", "email", "phone", "street", "color", "shape")
ORDINALS: tuple[str, ...] = ("first", "second", "third")
CELL_SEPARATORS: tuple[str, ...] = (",", ";", ":", "|")
