"""What attempts showed, judged: signatures, outcomes, verdicts, expectations, claims. Pure."""
