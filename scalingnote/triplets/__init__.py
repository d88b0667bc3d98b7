"""Training data of towers: importance of words, pseudo-queries, triplets, mined hard negatives."""
