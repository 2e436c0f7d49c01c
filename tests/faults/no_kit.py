"""A script that cannot even import what it needs."""

import a_package_that_nobody_has  # noqa: F401
