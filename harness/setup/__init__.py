"""Before anything is installed: which torch fits the driver. Standard library only."""
