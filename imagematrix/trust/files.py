"""The files of the policies that apply to a process: the site's, and the user's.

It loads nothing, because `select` calls it.
"""

from __future__ import annotations

import os

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from os import PathLike

__all__ = ["SITE", "VARIABLE", "policy_files"]

SITE = "/etc/imagematrix/policy.json"
VARIABLE = "IMAGEMATRIX_POLICY"


def policy_files(given: str | PathLike[str] | None = None) -> tuple[str, ...]:
    """Return the files of the policies, each of which an image has to satisfy; none if there is no policy.

    They are the site's, and the user's: `given`, or else the one that the environment names. Raises
    UsageError if it is unknown whether the site has one.
    """
    files = []
    try:
        os.lstat(SITE)  # a link without a target is a mistake, not a site without a policy
        files.append(SITE)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UsageError(f"{SITE} cannot be read: {error.strerror}") from error
    own = os.fspath(given) if given is not None else os.environ.get(VARIABLE) or None
    if own is not None and own not in files:
        files.append(own)
    return tuple(files)
