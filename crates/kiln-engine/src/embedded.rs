//! What image files say of how they were generated: the recipe, the AI mark, signed credentials. Every door writes its files
//! here.

use std::fmt;
use std::sync::Arc;

use kiln_base::Utc;
use kiln_credentials::{Role, Signer, Statement};
use kiln_image::{AiMark, Encoding, Metadata, RgbImage};

use crate::error::{Error, Result};
use crate::request::Request;

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
}

/// Who signs image files, and in whose name.
pub struct Credentials {
    /// The key with its certificate.
    pub signer: Signer,
    /// Who provides the images, besides the certificate's name.
    pub producer: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials of {:?}", self.signer.name())
    }
}

/// How an image was generated.
#[derive(Clone, Copy, Debug)]
pub struct ImageOrigin<'a> {
    /// The request.
    pub request: &'a Request,
    /// What kind of model it is, such as `FLUX.2 klein 4B`.
    pub model: &'a str,
    /// The recipe, as JSON.
    pub recipe: &'a str,
    /// A1111's description.
    pub parameters: Option<&'a str>,
}

impl Default for Embedded {
    fn default() -> Embedded {
        Embedded { recipe: true, ai_mark: true, aigc_label: None, credentials: None }
    }
}

impl Embedded {
    /// Encodes an image. It is signed last: nothing may be added to the file afterwards.
    pub fn encode(&self, image: &RgbImage, encoding: Encoding, origin: &ImageOrigin<'_>) -> Result<Vec<u8>> {
        let mark = self.ai_mark(origin);
        let metadata = Metadata {
            recipe: self.recipe.then_some(origin.recipe),
            parameters: origin.parameters.filter(|_| self.recipe),
            ai_mark: mark.as_ref(),
        };
        let file = kiln_image::encode_with_metadata(image, encoding, &metadata)?;
        let Some(credentials) = &self.credentials else { return Ok(file) };
        let request = origin.request;
        let statement = Statement {
            generator: ("Kiln".into(), VERSION.into()),
            model: origin.model.into(),
            producer: credentials.producer.clone(),
            ingredients: request
                .init
                .iter()
                .map(|_| Role::Initial)
                .chain(request.references.iter().map(|_| Role::Reference))
                .collect(),
            source: request.ai_source().address(),
            when: Utc::now(),
        };
        kiln_credentials::sign(&file, encoding.format, &statement, &credentials.signer)
            .map_err(Error::Credentials)
    }

    /// The mark of an image's file. It has neither prompt nor date nor the names of files.
    fn ai_mark(&self, origin: &ImageOrigin<'_>) -> Option<AiMark> {
        self.ai_mark.then(|| AiMark {
            source: origin.request.ai_source(),
            system: format!("Kiln, {}", origin.model),
            version: VERSION.into(),
            label: self.aigc_label.clone(),
        })
    }
}
