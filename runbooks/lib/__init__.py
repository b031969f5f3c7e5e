"""What runbooks are made of: questions to the view that several of them ask."""
