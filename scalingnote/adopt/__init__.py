"""Published embedding models as dual encoders, without training."""
