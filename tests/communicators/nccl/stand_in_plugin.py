"""A library with the functions that Muster asks of the plug-in, in a few lines of C, and no network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#pragma GCC visibility push(default)
static char reason[512];
static int say(char *buffer, size_t size, const char *text) { return snprintf(buffer, size, "%s", text); }
int muster_nccl_use_secret(uint64_t generation, const unsigned char *secret) {
  if (generation == 13) return -1;
  snprintf(reason, sizeof reason, "10.0.0.2:4711 ended it in generation %d with %02x%02x\n", (int)generation,
           secret[0], secret[31]);
  return 0;
}
int muster_nccl_reason(char *buffer, size_t size) { return say(buffer, size, reason); }
void muster_nccl_forget_reason(void) { reason[0] = 0; }
int muster_nccl_self_test(char *buffer, size_t size) {
  const char *wrong = getenv("STAND_IN_IS_WRONG");
  if (!wrong) return 0;
  say(buffer, size, wrong);
  return -1;
}
const char *muster_nccl_version(void) { return "stand-in, OpenSSL 3"; }
"""

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler"
)


def write_sources(folder: Path) -> Path:
    """Writes what a build takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stand_in.c").write_text(SOURCE)
    return folder


def build_stand_in(target: Path) -> Path:
    """Builds the library; returns ``target``."""
    source = write_sources(target.parent) / "stand_in.c"
    compiler = "cc" if shutil.which("cc") else "gcc"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(source)], check=True, timeout=60)
    return target
