//! Parts of the pipeline alone: encoding prompts, encoding images, decoding latents.

use std::sync::Arc;

use kiln_image::RgbImage;
use kiln_nn::Observer;
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};

use super::Pipeline;
use super::output::{IMAGE, TEXT, check_finite};
use crate::error::{Error, Result};
use crate::model::VaeFile;
use crate::plan::Plan;

impl<B: Backend> Pipeline<B> {
    /// Encodes the prompts of a plan, then its negative prompts if it has guidance: f32 `[tokens, dim]` each.
    pub fn encode_prompts(&self, plan: &Plan, observer: &mut dyn Observer<B>) -> Result<Vec<HostTensor>> {
        let b = &self.backend;
        let mut deferred = Vec::new();
        let texts = self.encode_text(plan, &mut deferred, observer)?;
        for work in deferred {
            work()?;
        }
        let download = |text: &B::Tensor| {
            let text = b.download(&b.cast(text, DType::F32)?)?;
            check_finite(TEXT, &text)?;
            Ok(text)
        };
        texts.prompts.iter().chain(&texts.negatives).map(download).collect()
    }

    /// Encodes an image, whose sides must be whole tokens, to normalized tokens, f32 `[rows · columns, channels]`.
    pub fn encode_image(
        &self,
        image: &RgbImage,
        vae: Option<&Arc<VaeFile>>,
        observer: &mut dyn Observer<B>,
    ) -> Result<HostTensor> {
        let (width, height) = (image.width(), image.height());
        let unit = self.model.pixels_per_token() as u32;
        if width.min(height) == 0 || width % unit != 0 || height % unit != 0 {
            let what = format!("an image of {width}x{height} can't be encoded");
            return Err(Error::request(what).with_hint(format!("its sides must be multiples of {unit}")));
        }
        let tokens = self.autoencoder(vae)?.encode(&self.backend, image, observer)?;
        let tokens = self.backend.download(&tokens)?;
        check_finite(IMAGE, &tokens)?;
        Ok(tokens)
    }

    /// Decodes normalized tokens on a `grid` of height and width.
    pub fn decode_latents(
        &self,
        latents: &HostTensor,
        grid: [usize; 2],
        vae: Option<&Arc<VaeFile>>,
        observer: &mut dyn Observer<B>,
    ) -> Result<RgbImage> {
        let tokens = self.upload_latents(latents, grid)?;
        Ok(self.autoencoder(vae)?.decode(&self.backend, &tokens, grid, observer)?)
    }

    /// Converts normalized tokens on a `grid` of height and width to the VAE's own latents, f32
    /// `[rows · patch, columns · patch, channels / patch²]`.
    pub fn unpack_latents(
        &self,
        latents: &HostTensor,
        grid: [usize; 2],
        vae: Option<&Arc<VaeFile>>,
    ) -> Result<HostTensor> {
        let tokens = self.upload_latents(latents, grid)?;
        Ok(self.backend.download(&self.autoencoder(vae)?.unpack(&self.backend, &tokens, grid)?)?)
    }

    fn upload_latents(&self, latents: &HostTensor, [height, width]: [usize; 2]) -> Result<B::Tensor> {
        let expected = [height * width, self.model.transformer.config.in_channels];
        if latents.shape().dims() != expected || expected[0] == 0 {
            let (found, [tokens, channels]) = (latents.shape(), expected);
            return Err(Error::request(format!(
                "latents have shape {found}, expected [{tokens}, {channels}]"
            )));
        }
        if !latents.is_finite() {
            return Err(Error::request("the latents have NaN or infinity"));
        }
        Ok(self.backend.upload(latents, DType::F32)?)
    }
}
