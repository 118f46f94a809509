//! `--size` and `--aspect`: the size of the image in the words of other programs.

use kiln_engine::{Model, Request};

use crate::args::Aspect;
use crate::error::CliError;

/// The size that options ask for.
#[derive(Clone, Copy, Debug, Default)]
pub struct SizeOptions {
    aspect: Option<Aspect>,
    width: Option<u32>,
    height: Option<u32>,
}

impl SizeOptions {
    /// Moves `--size` into the request; remembers `--aspect` and the side it is for.
    pub fn take(
        size: Option<(u32, u32)>,
        aspect: Option<Aspect>,
        request: &mut Request,
    ) -> Result<SizeOptions, CliError> {
        if let Some((width, height)) = size {
            (request.width, request.height) = (Some(width), Some(height));
        }
        if aspect.is_some() && request.width.is_some() && request.height.is_some() {
            return Err(
                CliError::usage("--aspect has no meaning beside both -W and -H").hint("leave one out")
            );
        }
        Ok(SizeOptions { aspect, width: request.width, height: request.height })
    }

    /// Sets width and height for `--aspect`, with about as many pixels as an image of the default size has.
    pub fn apply(self, request: &mut Request, model: &Model) {
        if let Some(aspect) = self.aspect {
            let (width, height) =
                aspect.size(self.width, self.height, model.default_size, model.pixels_per_token());
            (request.width, request.height) = (Some(width), Some(height));
        }
    }
}
