"""ComfyUI's progress bar, live preview and cancel button."""

try:
    import comfy.model_management
    import comfy.utils
except ImportError:
    # Outside of ComfyUI there is nothing to show and nobody who cancels.
    comfy = None

#: Longest side of a preview in pixels.
PREVIEW_SIZE = 512


class Watcher:
    """Passes on the progress of a request. The button *Cancel* raises ComfyUI's exception, which ends the request."""

    def __init__(self):
        self.bar = None
        self.step = self.steps = 0

    def progress(self, progress):
        """Takes a `kiln.Progress`."""
        if comfy is None:
            return
        comfy.model_management.throw_exception_if_processing_interrupted()
        steps = progress.steps * max(progress.images, 1)
        step = progress.image * progress.steps + progress.step
        if steps and (step, steps) != (self.step, self.steps):
            self.step, self.steps = step, steps
            self.show(None)

    def preview(self, preview):
        """Takes a `kiln.Preview`."""
        if comfy is not None and self.steps:
            self.show(("JPEG", preview.pil(), PREVIEW_SIZE))

    def show(self, preview):
        if self.bar is None:
            self.bar = comfy.utils.ProgressBar(self.steps)
        self.bar.update_absolute(self.step, self.steps, preview)
