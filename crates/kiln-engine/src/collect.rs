//! A sink that keeps what it gets.

use std::sync::{Mutex, PoisonError};

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
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let images = std::mem::take(&mut state.0);
        state.1.take().unwrap_or(Ok(())).map(|()| images)
    }
}

impl Sink for Collect {
    fn event(&self, _: &Event) {}

    fn image(&self, image: Image) -> Result<()> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0.push(image);
        Ok(())
    }

    fn ended(&self, result: Result<()>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = Some(result);
    }
}
