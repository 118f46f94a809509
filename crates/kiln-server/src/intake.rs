//! Pictures that come with an order: decoded once to see that they are pictures, and kept by their content.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_image::{Format, GrayPicture, Picture};

use crate::engine::Trouble;
use crate::store::StoreError;
use crate::{Order, Server};

const OWN: &str = "picture:";

impl Server {
    /// Checks an order, and keeps the pictures that it brings. Takes as long as decoding them does.
    pub(crate) fn take_in(&self, mut order: Order) -> Result<Order, Trouble> {
        self.config.limits.check(&order, self.catalogue.as_ref())?;
        for source in &mut order.references {
            *source = self.take_in_picture(source, "reference")?;
        }
        for (source, role) in [(&mut order.init, "init"), (&mut order.mask, "mask")] {
            if let Some(source) = source {
                *source = self.take_in_picture(source, role)?;
            }
        }
        Ok(order)
    }

    /// The input that a picture in an order stands for.
    fn take_in_picture(&self, source: &str, role: &str) -> Result<String, Trouble> {
        if source.starts_with("input:") {
            let known = self.store.inputs().path(source).is_some();
            let missing = || Trouble::order("input_not_found", format!("{role}: there is no such input"));
            return known.then(|| source.to_owned()).ok_or_else(missing);
        }
        if let Some(id) = source.strip_prefix(OWN) {
            let missing = || Trouble::order("input_not_found", format!("{role}: there is no such picture"));
            let row = self.store.picture(id).map_err(storage)?.ok_or_else(missing)?;
            let bytes = std::fs::read(self.store.picture_path(&row.file)).map_err(|_| missing())?;
            return self.keep_input(&bytes, role);
        }
        self.keep_input(&decode(source, role)?, role)
    }

    /// Keeps a picture file, if it is one.
    pub(crate) fn keep_input(&self, bytes: &[u8], role: &str) -> Result<String, Trouble> {
        self.decode_input(bytes, role)?;
        self.store.inputs().keep(bytes).map_err(storage)
    }

    /// Keeps a mask in OpenAI's form, see-through where to paint; one without such places is white where to paint.
    pub(crate) fn keep_mask(&self, bytes: &[u8]) -> Result<String, Trouble> {
        self.decode_input(bytes, "mask")?;
        let through = kiln_image::transparency("mask", bytes).map_err(unreadable)?;
        let Some(mask) = through else { return self.store.inputs().keep(bytes).map_err(storage) };
        let png = kiln_image::encode(&gray(&mask)?, Format::Png, None).map_err(unreadable)?;
        self.store.inputs().keep(&png).map_err(storage)
    }

    fn decode_input(&self, bytes: &[u8], role: &str) -> Result<Picture, Trouble> {
        let (width, height) = kiln_image::dimensions(role, bytes).map_err(unreadable)?;
        let most = self.config.limits.input_pixels;
        if u64::from(width) * u64::from(height) > most {
            let message = format!("{role} has {width}x{height} pixels, at most {most} are read");
            return Err(Trouble::order("picture_too_large", message));
        }
        kiln_image::from_bytes(role, bytes).map_err(unreadable)
    }
}

fn gray(mask: &GrayPicture) -> Result<Picture, Trouble> {
    let pixels = mask.pixels().iter().flat_map(|value| [*value; 3]).collect();
    Picture::new(mask.width(), mask.height(), pixels).map_err(unreadable)
}

fn unreadable(error: kiln_image::Error) -> Trouble {
    Trouble::order("invalid_picture", error.to_string())
}

fn storage(error: StoreError) -> Trouble {
    Trouble::server("storage", error.to_string())
}

/// The bytes of a data URL or of base64.
fn decode(source: &str, role: &str) -> Result<Vec<u8>, Trouble> {
    let wrong = |what: &str| Trouble::order("invalid_picture", format!("{role}: {what}"));
    let text = match source.strip_prefix("data:") {
        Some(rest) => rest.split_once(";base64,").ok_or_else(|| wrong("a data URL must be base64"))?.1,
        None if source.starts_with("http:") || source.starts_with("https:") => {
            return Err(wrong("pictures are not fetched from elsewhere: send them as a data URL"));
        }
        None => source,
    };
    let text: std::borrow::Cow<'_, str> = match text.contains(char::is_whitespace) {
        true => text.split_whitespace().collect::<String>().into(),
        false => text.into(),
    };
    BASE64_STANDARD.decode(text.as_bytes()).map_err(|error| wrong(&format!("not base64: {error}")))
}
