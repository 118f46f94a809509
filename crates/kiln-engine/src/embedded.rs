//! What image files say of how they were generated: the recipe, the AI mark, signed credentials, the watermark. Every door
//! writes its files here.

use std::borrow::Cow;
use std::sync::Arc;

use kiln_base::Utc;
use kiln_credentials::{CAN_VERIFY, Carried, Ingredient, Role, Statement, carry};
use kiln_image::{AiMark, Encoding, Metadata, RgbImage, read_manifest_store};

use crate::credentials::Credentials;
use crate::error::{Error, Result};
use crate::request::{FileRef, Request};
use crate::watermark::{Payload, add_watermark};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What a file says of how its image was generated.
#[derive(Clone, Debug)]
pub struct Embedded {
    /// The recipe: prompt, seed, names of files.
    pub recipe: bool,
    /// That a model made the image.
    pub ai_mark: bool,
    /// A label for the mark, as China's GB 45438 asks of services.
    pub aigc_label: Option<String>,
    /// Who signs the file.
    pub credentials: Option<Arc<Credentials>>,
    /// The invisible watermark, which changes pixels.
    pub watermark: Option<Payload>,
}

/// How an image was generated.
#[derive(Clone, Copy)]
pub struct ImageOrigin<'a> {
    /// The request.
    pub request: &'a Request,
    /// What kind of model it is, such as `FLUX.2 klein 4B`.
    pub model: &'a str,
    /// The recipe, as JSON.
    pub recipe: &'a str,
    /// A1111's description.
    pub parameters: Option<&'a str>,
    /// The file of an input image, if it is still there: signed images carry its credentials over.
    pub inputs: &'a dyn Fn(&FileRef) -> Option<Vec<u8>>,
}

impl Default for Embedded {
    fn default() -> Embedded {
        Embedded { recipe: true, ai_mark: true, aigc_label: None, credentials: None, watermark: None }
    }
}

impl Embedded {
    /// Refuses a signer whose certificate has expired since it was opened: before an image is generated.
    pub fn check(&self) -> Result<()> {
        self.credentials.as_ref().map_or(Ok(()), |own| own.signer.check()).map_err(Error::Credentials)
    }

    /// What to tell of a file that an image is made from: whether its credentials are carried over.
    pub fn input_note(&self, name: &str, file: &[u8]) -> Option<String> {
        let has_credentials = read_manifest_store(file).is_ok_and(|store| store.is_some());
        let is_carried = || CAN_VERIFY && self.credentials.is_some() && carry(file.to_vec()).is_some();
        has_credentials.then(|| {
            let are = if is_carried() { "are" } else { "are not" };
            format!("`{name}` has credentials (C2PA), which {are} carried over")
        })
    }

    /// Encodes an image that is no result, such as a preview: with the mark alone.
    pub fn encode_preview(
        &self,
        image: &RgbImage,
        encoding: Encoding,
        request: &Request,
        model: &str,
    ) -> Result<Vec<u8>> {
        let mark = self.ai_mark(request, model);
        let metadata = Metadata { recipe: None, parameters: None, ai_mark: mark.as_ref() };
        Ok(kiln_image::encode_with_metadata(image, encoding, &metadata)?)
    }

    /// Encodes an image. It is signed last: nothing may be added to the file afterwards.
    pub fn encode(&self, image: &RgbImage, encoding: Encoding, origin: &ImageOrigin<'_>) -> Result<Vec<u8>> {
        let mark = self.ai_mark(origin.request, origin.model);
        let metadata = Metadata {
            recipe: self.recipe.then_some(origin.recipe),
            parameters: origin.parameters.filter(|_| self.recipe),
            ai_mark: mark.as_ref(),
        };
        let mut image = Cow::Borrowed(image);
        if let Some(payload) = self.watermark {
            add_watermark(image.to_mut(), payload)?;
        }
        let file = kiln_image::encode_with_metadata(&image, encoding, &metadata)?;
        let Some(credentials) = &self.credentials else { return Ok(file) };
        let request = origin.request;
        let statement = Statement {
            generator: ("Kiln".into(), VERSION.into()),
            model: origin.model.into(),
            producer: credentials.producer.clone(),
            ingredients: request
                .init
                .iter()
                .map(|file| (Role::Initial, file))
                .chain(request.references.iter().map(|file| (Role::Reference, file)))
                .map(|(role, file)| Ingredient { role, credentials: carried(origin, file) })
                .collect(),
            source: request.ai_source().address(),
            watermarked: self.watermark.is_some(),
            when: Utc::now(),
        };
        kiln_credentials::sign(&file, encoding.format, &statement, &credentials.signer)
            .map_err(Error::Credentials)
    }

    /// The mark of an image's file. It has neither prompt nor date nor the names of files.
    fn ai_mark(&self, request: &Request, model: &str) -> Option<AiMark> {
        self.ai_mark.then(|| AiMark {
            source: request.ai_source(),
            system: format!("Kiln, {model}"),
            version: VERSION.into(),
            label: self.aigc_label.clone(),
        })
    }
}

/// The credentials of an input image, with what checking them shows.
fn carried(origin: &ImageOrigin<'_>, file: &FileRef) -> Option<Carried> {
    if CAN_VERIFY { (origin.inputs)(file).and_then(carry) } else { None }
}
