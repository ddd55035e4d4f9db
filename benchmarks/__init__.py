"""Speed, shown and not tested: each module prints a table and writes its figures as JSON."""
