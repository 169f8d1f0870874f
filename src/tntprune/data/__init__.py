"""Photos: folders, data sets, streams, their reading and augmentation."""
