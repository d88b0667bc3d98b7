"""What towers learn from: importance of words, pseudo-queries, triplets, mined hard negatives."""
