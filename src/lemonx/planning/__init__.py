"""From a source's spec and the sizes asked for to a Plan. No tensor is computed and no model is built here."""
