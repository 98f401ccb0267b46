"""What a provider must pass (`conformance`), and what users need to test their own programs (`plugin`)."""
