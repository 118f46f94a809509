"""What the tests share: tiny models, and small requests for them."""

import functools
import os
import unittest

import kiln

SMALL = {"width": 64, "height": 64, "steps": 2, "max_tokens": 32, "seed": 1}


def path(name):
    """The folder of a tiny model; a test is skipped where it was not made."""
    variable = "KILN_TEST_" + name.upper().replace("-", "_")
    if variable not in os.environ:
        raise unittest.SkipTest(f"there is no model {name}")
    return os.environ[variable]


@functools.cache
def model(name="klein"):
    return kiln.load(path(name), dtype="f32", device="cpu")


@functools.cache
def pipeline(kind, name):
    pipe = getattr(kiln, kind).from_pretrained(path(name), torch_dtype="f32", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def raises(kind, text, call, *args, **kwargs):
    """Checks that a call raises, with a text in its message."""
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
