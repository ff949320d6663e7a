"""The word pools that task instances are drawn from.

The pools are small on purpose: a policy of under two million parameters learns to copy a name only when each word of it has
been met many times in many places. No word may be a part of another one, because oracles use plain `grep` and `sed`.
"""

from __future__ import annotations

FOLDERS: tuple[str, ...] = (
    "data", "docs", "notes", "logs", "conf", "src", "lib", "work", "inbox", "store", "site", "team", "data/old", "src/app",
    "docs/new", "work/tmp",
)  # fmt: skip
ARCHIVES: tuple[str, ...] = ("old", "done", "safe", "past", "keep", "vault")
EXTENSIONS: tuple[str, ...] = ("txt", "md", "log", "csv", "cfg", "ini", "list", "dat")
SEPARATORS: tuple[str, ...] = ("-", "_", ".", "")

STEMS: tuple[str, ...] = (
    "report", "plan", "budget", "index", "draft", "memo", "invoice", "roster", "menu", "recipe", "letter", "agenda", "ledger",
    "survey", "ticket", "guide", "manual", "sketch", "profile", "sample", "quote", "chart", "table", "input", "batch", "visit",
    "route", "photo", "story", "lesson",
)  # fmt: skip
VALUES: tuple[str, ...] = (
    "red", "green", "blue", "amber", "violet", "apple", "pear", "plum", "lemon", "cherry", "tiger", "otter", "eagle", "whale",
    "horse", "iron", "silver", "copper", "marble", "cotton", "river", "ocean", "forest", "desert", "winter",
)  # fmt: skip
KEYS: tuple[str, ...] = (
    "port", "limit", "depth", "width", "height", "speed", "retries", "delay", "weight", "level", "volume", "pages",
)  # fmt: skip
FIELDS: tuple[str, ...] = (
    "owner", "author", "title", "city", "country", "email", "phone", "street", "rank", "color", "shape", "origin",
)  # fmt: skip
ORDINALS: tuple[str, ...] = ("first", "second", "third")
CELL_SEPARATORS: tuple[str, ...] = (",", ";", ":", "|")
