"""Plant errors in a training script, and see whether a comparison of traces names where they
begin."""
