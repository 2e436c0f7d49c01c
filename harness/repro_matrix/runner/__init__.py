"""One run: what is wanted, in which order, side by side, on leased devices, shown while it goes
on."""
