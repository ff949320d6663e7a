"""Is a command line package-heavy? Looks into pipelines, lists, substitutions, wrappers and nested shells.

This only chooses a lane, so it errs towards ordinary: what is not recognised runs as an ordinary command.
"""

from __future__ import annotations

import itertools
import re
import shlex

from services.sandbox.lane_rules import Lane

_MAX_DEPTH = 6
_MAX_BYTES = 64 * 1024
_SHELLS = {"bash", "sh", "dash", "zsh", "ksh"}
_WRAPPERS = frozenset(
    [
        "sudo",
        "doas",
        "env",
        "nohup",
        "time",
        "nice",
        "ionice",
        "timeout",
        "stdbuf",
        "xargs",
        "parallel",
        "exec",
        "command",
        "builtin",
        "setsid",
        "taskset",
        "chrt",
        "watch",
    ]
)
_KEYWORDS = {"if", "then", "else", "elif", "while", "until", "do", "!", "{", "}", "fi", "done"}
_ANY = frozenset({"*"})
_SYSTEM = frozenset(["install", "add", "update", "upgrade", "dist-upgrade", "full-upgrade", "build-dep", "-S", "-Sy", "-Syu"])
_INSTALLERS = frozenset(["install", "add", "update", "upgrade", "build", "create", "sync"])
_SCRIPTS = frozenset(["install", "i", "ci", "add", "build", "update", "test"])
_BUILDERS = frozenset(["build", "install", "test", "restore", "run"])
_HEAVY: dict[str, frozenset[str]] = {
    **dict.fromkeys(["apt", "apt-get", "aptitude", "yum", "dnf", "apk", "brew", "zypper", "pacman"], _SYSTEM),
    "dpkg": frozenset({"-i", "--install"}),
    **dict.fromkeys(["pip", "pip3", "pipx"], frozenset({"install", "wheel", "download", "upgrade"})),
    **dict.fromkeys(
        ["uv", "poetry", "pdm", "conda", "mamba", "micromamba", "composer", "opam", "gem", "bundle", "rustup", "nvm"],
        _INSTALLERS,
    ),
    **dict.fromkeys(["npm", "yarn", "pnpm", "bun"], _SCRIPTS),
    "cargo": frozenset(
        ["build", "b", "install", "test", "t", "run", "r", "check", "c", "bench", "fetch", "update", "clippy", "doc"]
    ),
    "go": frozenset(["build", "install", "test", "get", "mod", "run", "generate"]),
    "cmake": frozenset({"--build", "--install"}),
    "meson": frozenset({"compile", "install", "test"}),
    **dict.fromkeys(["cabal", "stack", "dotnet", "swift"], _BUILDERS),
    **dict.fromkeys(["npx", "ninja", "mvn", "mvnw", "gradle", "gradlew", "bazel", "buck2", "configure"], _ANY),
}
_MODULES = {"pip": _HEAVY["pip"], "build": _ANY, "ensurepip": _ANY}
_JOBS = re.compile(r"^(-[A-Za-z]*j\d*|--jobs(=\d+)?)$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_VALUE = re.compile(r"^[0-9.]+[smhd]?$|^0x[0-9a-f]+$")
_OPERATORS = "();<>|&`\n"
_SUBSTITUTION = re.compile(r"\$\((?!\()|`")


def lane_of(command: str) -> Lane:
    """The lane that a shell line belongs to."""
    return Lane.PACKAGE if is_package_heavy(command) else Lane.COMMAND


def is_package_heavy(command: str, _depth: int = 0) -> bool:
    """True if some simple command in the line installs packages or builds in parallel."""
    if _depth > _MAX_DEPTH or len(command) > _MAX_BYTES:
        return False
    simple: list[str] = []
    for word in [*_words(command), ";"]:
        if word and all(char in _OPERATORS for char in word):
            if word[0] in "<>":
                continue
            if simple and _is_heavy(simple, _depth):
                return True
            simple = []
        else:
            simple.append(word)
    return False


def _words(command: str) -> list[str]:
    """Words and operators; a line whose quotes do not close is split at blanks instead."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace = " \t\r"
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return re.split(r"[ \t\r]+|(?<=[();|&`\n])|(?=[();|&`\n])", command)


def _is_heavy(words: list[str], depth: int) -> bool:
    substituted = (part for word in words for part in _SUBSTITUTION.split(word)[1:])
    if any(is_package_heavy(part, depth + 1) for part in substituted):
        return True
    wrapped = False
    for position, word in enumerate(words):
        name = word.rpartition("/")[2].lstrip("$")
        if _ASSIGNMENT.match(word) or word in _KEYWORDS:
            continue
        if name in _WRAPPERS:
            wrapped = True
            continue
        if wrapped and (word.startswith("-") or _VALUE.match(word)):
            continue
        return _starts_heavy(name, words[position + 1 :], depth)
    return False


def _starts_heavy(name: str, arguments: list[str], depth: int) -> bool:
    if name in _SHELLS:
        return any(
            is_package_heavy(argument, depth + 1)
            for option, argument in itertools.pairwise(arguments)
            if re.fullmatch(r"-[a-z]*c[a-z]*", option)
        )
    if name == "eval":
        return is_package_heavy(" ".join(arguments), depth + 1)
    if name in ("make", "gmake"):
        return any(_JOBS.match(argument) for argument in arguments)
    if re.fullmatch(r"python[0-9.]*", name):
        return _python_is_heavy(arguments)
    heavy = _HEAVY.get("pip" if re.fullmatch(r"pip[0-9.]+", name) else name, frozenset())
    return heavy is _ANY or _mentions(heavy, arguments) or (name == "yarn" and not arguments)


def _python_is_heavy(arguments: list[str]) -> bool:
    for option, module, rest in ((arguments[i], arguments[i + 1], arguments[i + 2 :]) for i in range(len(arguments) - 1)):
        if option == "-m" and module in _MODULES:
            return _MODULES[module] is _ANY or _mentions(_MODULES[module], rest)
        if option.endswith("setup.py"):
            return module in {"install", "build", "develop", "bdist_wheel", "build_ext"}
    return False


def _mentions(heavy: frozenset[str], arguments: list[str]) -> bool:
    """Whether one of the first words is a heavy subcommand; options may come before it, some with values."""
    return any(argument in heavy for argument in arguments[:6])
