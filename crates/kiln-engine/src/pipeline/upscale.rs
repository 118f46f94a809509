//! Upscales an image tile by tile; see [`UpscaleInputs`] for the idea.
//!
//! A tile starts from the image as far as it is finished, noised with its part of the whole image's noise. Tokens in the
//! outer half of an overlap keep what the neighbour has there, so that lines and textures continue across the seam. The
//! decoded tile gets the tones of the enlarged image and is blended in.

use kiln_image::{RgbImage, Tile};
use kiln_nn::Event;
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};

use super::Pipeline;
use super::batch::{Batch, BatchMember};
use super::denoise::{Conditioning, Denoiser, InitialLatents, ReferenceTokens};
use super::generate::PreparedPlan;
use super::output::{PendingOutput, not_finite_after};
use crate::error::Result;
use crate::plan::UpscaleInputs;
use crate::progress::StepCounts;

impl<B: Backend> Pipeline<B> {
    /// Upscales one image of a plan, and passes it to the member's output.
    pub(super) fn upscale(
        &self,
        prepared: &PreparedPlan<'_, B>,
        inputs: &UpscaleInputs,
        [member, image]: [usize; 2],
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<()> {
        let enlarged = inputs.enlarged()?;
        let mut result = enlarged.clone();
        let mut steps = StepCounts::default();
        let mut latents = Canvas::new(inputs.grid(), self.model.transformer.config.in_channels, inputs.unit);
        for (index, tile) in inputs.tiles.tiles().enumerate() {
            let event = Event::TileStarted { image, tile: index, tiles: inputs.tiles.count() };
            let Some(input) = with(batch, member, |m| {
                m.observer.event(event)?;
                self.encode_tile(prepared, &tile, &result, enlarged, m)
            }) else {
                return Ok(());
            };
            let whole_noise = &prepared.noise[image];
            let noise = crop_tokens(whole_noise, inputs.grid()[1], &tile, inputs.unit)?;
            let conditioning = [Conditioning {
                noise: &noise,
                references: Some(&input.references),
                initial: &input.initial,
                ..prepared.conditioning(member, image)
            }];
            let (b, variant) = (&self.backend, self.model.variant);
            let denoiser = Denoiser { b, transformer: &self.transformer, variant, plan: prepared.plan };
            let states = denoiser.run(&conditioning, batch)?;
            let Some(state) = states.first() else { return Ok(()) };
            let Some(decoded) = with(batch, member, |m| {
                // Now, not at the end: the following tiles build upon this one.
                let tokens = b.download(&state.latents)?;
                if !tokens.is_finite() {
                    let done = state.steps.computed + state.steps.reused;
                    let all = prepared.plan.steps - prepared.plan.first_step;
                    let images = input.references.tokens.clone();
                    return Err(not_finite_after(b, [done, all], prepared.text(image), &[&images]));
                }
                m.observer.event(Event::DecodingImage { image })?;
                let decoded =
                    prepared.autoencoder.decode(b, &state.latents, prepared.plan.grid(), m.observer)?;
                Ok((decoded, tokens))
            }) else {
                return Ok(());
            };
            let (decoded, tokens) = decoded;
            steps.computed += state.steps.computed;
            steps.reused += state.steps.reused;
            latents.paste(&tokens, &tile)?;
            tile.blend(&mut result, &kiln_image::match_tones(&decoded, &tile.crop(enlarged)));
            batch.with_member(member, |m| Ok(m.observer.partial_image(&result)?));
        }
        let [width, height] = inputs.size();
        let result = result.crop(0, 0, width, height);
        let latents = latents.finish()?;
        batch.with_member(member, |m| {
            let deferred = std::mem::take(&mut *kiln_base::lock(&prepared.deferred));
            (m.output)(PendingOutput {
                index: image,
                steps,
                image: Box::new(move || Ok(result)),
                latents: Box::new(move || Ok(latents)),
                text: prepared.text(image).clone(),
                deferred,
            })
        });
        Ok(())
    }

    /// Encodes a tile: as it is now, to start from, and as it was, as the first reference.
    fn encode_tile(
        &self,
        prepared: &PreparedPlan<'_, B>,
        tile: &Tile,
        result: &RgbImage,
        enlarged: &RgbImage,
        member: &mut BatchMember<'_, B>,
    ) -> Result<TileInputs<B>> {
        let (b, vae, observer) = (&self.backend, &prepared.autoencoder, &mut *member.observer);
        observer.event(Event::EncodingReference { index: 0, total: 2 })?;
        let tokens = vae.encode(b, &tile.crop(result), observer)?;
        let initial = match taken_tokens(tile, self.model.pixels_per_token() as u32) {
            Some(mask) => {
                let mask = HostTensor::from_f32([mask.len()], mask)?;
                InitialLatents::Masked { tokens, mask: b.upload(&mask, DType::F32)? }
            }
            None => InitialLatents::Image(tokens),
        };
        observer.event(Event::EncodingReference { index: 1, total: 2 })?;
        let original = vae.encode(b, &tile.crop(enlarged), observer)?;
        let others = prepared.references.as_ref();
        let tokens = match others {
            Some(others) => b.concat_rows(&[&original, &others.tokens])?,
            None => original,
        };
        let mut grids = vec![prepared.plan.grid()];
        grids.extend(others.iter().flat_map(|others| &others.grids));
        Ok(TileInputs { initial, references: ReferenceTokens { tokens, grids } })
    }
}

/// The encoded inputs of a tile.
struct TileInputs<B: Backend> {
    initial: InitialLatents<B>,
    references: ReferenceTokens<B>,
}

/// Calls a function on a member; `None` if the member has ended or ends with its error.
fn with<'m, B: Backend, T>(
    batch: &mut Batch<'_, 'm, B>,
    member: usize,
    call: impl FnOnce(&mut BatchMember<'m, B>) -> Result<T>,
) -> Option<T> {
    let mut result = None;
    batch.with_member(member, |m| {
        result = Some(call(m)?);
        Ok(())
    });
    result
}

/// Returns which tokens of a tile may change (1) and which belong to finished neighbours (0); `None` if all may change.
fn taken_tokens(tile: &Tile, unit: u32) -> Option<Vec<f32>> {
    let [columns, rows] = [tile.width, tile.height].map(|side| side / unit);
    let free = |i: u32| {
        let [x, y] = [i % columns, i / columns].map(|token| token * unit + unit / 2);
        f32::from(u8::from(!tile.is_taken(x, y)))
    };
    let mask: Vec<f32> = (0..columns * rows).map(free).collect();
    mask.contains(&0.0).then_some(mask)
}

/// Returns the tokens `[tokens, channels]` of a tile, from those of the whole image.
fn crop_tokens(whole: &HostTensor, columns: usize, tile: &Tile, unit: u32) -> Result<HostTensor> {
    let (values, channels) = (whole.to_f32()?, whole.shape().last());
    let [left, top, width, height] =
        [tile.left, tile.top, tile.width, tile.height].map(|v| (v / unit) as usize);
    let row = |y: usize| &values[((top + y) * columns + left) * channels..][..width * channels];
    let cropped = (0..height).flat_map(row).copied().collect();
    Ok(HostTensor::from_f32([width * height, channels], cropped)?)
}

/// The final tokens of the whole image.
struct Canvas {
    grid: [usize; 2],
    channels: usize,
    /// Pixels along a side of one token.
    unit: u32,
    values: Vec<f32>,
}

impl Canvas {
    fn new(grid: [usize; 2], channels: usize, unit: u32) -> Canvas {
        Canvas { grid, channels, unit, values: vec![0.0; grid[0] * grid[1] * channels] }
    }

    /// Copies a tile's tokens, except those that belong to finished neighbours.
    fn paste(&mut self, tokens: &HostTensor, tile: &Tile) -> Result<()> {
        let unit = self.unit;
        let (values, mask) = (tokens.to_f32()?, taken_tokens(tile, unit));
        let [left, top, width] = [tile.left, tile.top, tile.width].map(|v| (v / unit) as usize);
        for (i, token) in values.chunks_exact(self.channels).enumerate() {
            if mask.as_ref().is_none_or(|mask| mask[i] == 1.0) {
                let at = ((top + i / width) * self.grid[1] + left + i % width) * self.channels;
                self.values[at..at + self.channels].copy_from_slice(token);
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<HostTensor> {
        Ok(HostTensor::from_f32([self.grid[0] * self.grid[1], self.channels], self.values)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_image::TileGrid;

    #[test]
    fn the_tokens_of_all_tiles_give_the_image() {
        let grid = [9, 14];
        let values: Vec<f32> = (0..9 * 14 * 2).map(|v| v as f32).collect();
        let whole = HostTensor::from_f32([9 * 14, 2], values).unwrap();
        let tiles = TileGrid::new([14 * 16, 9 * 16], 96, 32, 16);
        let mut canvas = Canvas::new(grid, 2, 16);
        for tile in tiles.tiles() {
            canvas.paste(&crop_tokens(&whole, grid[1], &tile, 16).unwrap(), &tile).unwrap();
        }
        assert_eq!(canvas.finish().unwrap(), whole);
    }

    #[test]
    fn the_outer_half_of_an_overlap_belongs_to_the_neighbour() {
        let tiles: Vec<Tile> = TileGrid::new([160, 96], 96, 32, 16).tiles().collect();
        assert_eq!(taken_tokens(&tiles[0], 16), None);
        let mask = taken_tokens(&tiles[1], 16).unwrap();
        assert_eq!(mask[..6], [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(mask.iter().filter(|v| **v == 0.0).count(), 6);
    }
}
