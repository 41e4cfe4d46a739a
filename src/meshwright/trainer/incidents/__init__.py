"""Steps that are not finite: finding, recording, surviving and replaying them."""
