"""What is audited: paths become files, files become batches, with nothing damaged among them."""
