"""What a call costs: how it is timed (``timing``), and the files that runs are kept in (``files``)."""
