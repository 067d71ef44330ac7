"""How an exercise is judged and its mistake is named.  May import the subjects."""
