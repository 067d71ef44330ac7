"""The contracts of autograd, asked of every function."""

import pytest

from judging import autograd
from tests.contracts import contracts_of

pytestmark = pytest.mark.usefixtures("small_tiles")
globals().update(contracts_of(autograd))
