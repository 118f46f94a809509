//! A sink that collects images in memory.

use std::sync::Mutex;

use kiln_base::lock;
use kiln_nn::Event;

use crate::error::Result;
use crate::sink::{GeneratedImage, Sink};

/// Collects the images of one request.
#[derive(Default)]
pub struct ImageCollector {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    images: Vec<GeneratedImage>,
    result: Option<Result<()>>,
}

impl ImageCollector {
    /// Takes the images collected so far, or the request's error.
    pub fn take(&self) -> Result<Vec<GeneratedImage>> {
        let State { images, result } = std::mem::take(&mut *lock(&self.state));
        result.unwrap_or(Ok(())).map(|()| images)
    }
}

impl Sink for ImageCollector {
    fn event(&self, _: &Event) {}

    fn image(&self, image: GeneratedImage) -> Result<()> {
        lock(&self.state).images.push(image);
        Ok(())
    }

    fn ended(&self, result: Result<()>) {
        lock(&self.state).result = Some(result);
    }
}
