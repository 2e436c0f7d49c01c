"""Cases x axes -> cells -> what fits this hardware, how, and in which order. Pure."""
