"""The contract between who samples and who trains: numpy and pyarrow only."""
