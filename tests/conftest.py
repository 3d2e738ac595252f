import hypothesis

hypothesis.settings.register_profile("gapless", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("gapless")
