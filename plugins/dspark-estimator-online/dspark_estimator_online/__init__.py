"""A confidence estimator for dspark: logistic regression of acceptance, learned while decoding."""
