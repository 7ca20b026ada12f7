"""Errors travel between ranks whole, and are also what Python's own code would catch."""

from __future__ import annotations

import builtins
import pickle
import re

import pytest

from dcp_zarr import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_an_error_pickles_with_its_context_and_notes(error):
    raised = error("it's 'so'", fqn="a.w", region="[0:1]", rank=3, path="x.zarr")
    raised.add_note("while saving")
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is error
    assert str(again) == "it's 'so'"
    assert (again.fqn, again.region, again.rank, again.path) == ("a.w", "[0:1]", 3, "x.zarr")
    assert again.__notes__ == ["while saving"]


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = dict(re.findall(r"[├└]── (\w+) \((\w+)\)", errors.__doc__))
    for error in CLASSES:
        if error is not errors.DcpZarrError:
            assert issubclass(error, errors.DcpZarrError)
            assert issubclass(error, getattr(builtins, drawn.pop(error.__name__)))
    assert not drawn
