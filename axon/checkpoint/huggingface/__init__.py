"""Models of the Hugging Face hub, in and out, by the tables beside our models (`axon.nn.hugging_face`)."""
