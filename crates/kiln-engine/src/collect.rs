//! A sink that keeps what it gets.

use std::sync::Mutex;

use kiln_base::lock;
use kiln_model::Event;

use crate::error::Result;
use crate::sink::{Image, Sink};

/// Keeps the images of one request.
#[derive(Default)]
pub struct Collect {
    state: Mutex<(Vec<Image>, Option<Result<()>>)>,
}

impl Collect {
    /// The images so far, or why there are none.
    pub fn take(&self) -> Result<Vec<Image>> {
        let mut state = lock(&self.state);
        let images = std::mem::take(&mut state.0);
        state.1.take().unwrap_or(Ok(())).map(|()| images)
    }
}

impl Sink for Collect {
    fn event(&self, _: &Event) {}

    fn image(&self, image: Image) -> Result<()> {
        lock(&self.state).0.push(image);
        Ok(())
    }

    fn ended(&self, result: Result<()>) {
        lock(&self.state).1 = Some(result);
    }
}
