//! The noise that denoising starts from.

use kiln_tensor::rng::{Generator, HalfDType};
use kiln_tensor::{DType, HostTensor};

use crate::error::{Error, Result};
use crate::request::Rng;

/// Maximum number of images per request.
pub(crate) const MAX_IMAGES: usize = 1000;

/// The source of the noise.
#[derive(Clone, Debug)]
pub enum NoiseSource {
    /// One generator draws the noise of all images together, as in diffusers.
    Seed {
        /// The generator's seed.
        seed: u64,
        /// The kind of generator.
        rng: Rng,
    },
    /// The noise of one image from a batch that one generator drew, to generate it again without the others.
    OneOfBatch {
        /// The generator's seed.
        seed: u64,
        /// The kind of generator.
        rng: Rng,
        /// Index of the image in the batch, from 0.
        index: usize,
        /// Number of images in the batch.
        batch: usize,
    },
    /// A generator for each image.
    Seeds {
        /// The generators' seeds.
        seeds: Vec<u64>,
        /// The kind of generator.
        rng: Rng,
    },
    /// Given noise: `[images, channels, height/16, width/16]` as in diffusers, or `[images, tokens, channels]`. For one
    /// image the first dimension may be absent.
    Given(HostTensor),
}

/// Returns the noise of each image as f32 tokens `[tokens, channels]`. Draws it as diffusers does: channels first, all
/// images of one generator in one call, rounded to `dtype`.
pub(crate) fn draw(
    noise: &NoiseSource,
    images: usize,
    channels: usize,
    grid: [usize; 2],
    dtype: DType,
) -> Result<Vec<HostTensor>> {
    let tokens = grid[0] * grid[1];
    let size = channels * tokens;
    let pack = |values: &[f32]| {
        let packed = (0..size).map(|i| values[(i % channels) * tokens + i / channels]).collect();
        let noise = HostTensor::from_f32([tokens, channels], packed)?;
        Ok(noise.to_dtype(dtype)?.to_dtype(DType::F32)?)
    };
    match noise {
        NoiseSource::Seed { seed, rng } => {
            generator(*rng, *seed).randn(images * size).chunks_exact(size).map(pack).collect()
        }
        NoiseSource::OneOfBatch { seed, rng, index, batch } => {
            if images != 1 || index >= batch || *batch > MAX_IMAGES {
                return Err(Error::request(format!(
                    "image {index} of a batch of {batch} can't give the noise of {images} images"
                )));
            }
            // What a generator draws depends on the length, so the noise of the others is drawn as well.
            let all = generator(*rng, *seed).randn(batch * size);
            Ok(vec![pack(&all[index * size..][..size])?])
        }
        NoiseSource::Seeds { seeds, rng } => {
            if seeds.len() != images {
                let given = seeds.len();
                return Err(Error::request(format!("{given} seeds were given for {images} images")));
            }
            seeds.iter().map(|&seed| pack(&generator(*rng, seed).randn(size))).collect()
        }
        NoiseSource::Given(noise) => given(noise, images, channels, grid, pack),
    }
}

fn generator(rng: Rng, seed: u64) -> Generator {
    match rng {
        Rng::Cpu => Generator::cpu(seed),
        Rng::CpuBf16 => Generator::cpu_half(seed, HalfDType::Bf16),
        Rng::CpuF16 => Generator::cpu_half(seed, HalfDType::F16),
        Rng::Cuda => Generator::cuda(seed),
    }
}

fn given(
    noise: &HostTensor,
    images: usize,
    channels: usize,
    [height, width]: [usize; 2],
    pack: impl Fn(&[f32]) -> Result<HostTensor>,
) -> Result<Vec<HostTensor>> {
    let tokens = height * width;
    let dims = noise.shape().dims();
    let values = noise.to_f32()?;
    if dims.ends_with(&[channels, height, width])
        && dims[..dims.len() - 3].iter().product::<usize>() == images
    {
        return values.chunks_exact(channels * tokens).map(pack).collect();
    }
    if dims.ends_with(&[tokens, channels]) && dims[..dims.len() - 2].iter().product::<usize>() == images {
        let packed = |v: &[f32]| Ok(HostTensor::from_f32([tokens, channels], v.to_vec())?);
        return values.chunks_exact(channels * tokens).map(packed).collect();
    }
    Err(Error::request(format!(
        "the noise has shape {}, expected [{images}, {channels}, {height}, {width}] or [{images}, {tokens}, \
         {channels}]",
        noise.shape()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_channels_first_give_the_same_noise() {
        let unpacked = HostTensor::from_f32([1, 3, 2, 2], (0..12).map(|v| v as f32).collect()).unwrap();
        let packed =
            HostTensor::from_f32([4, 3], vec![0., 4., 8., 1., 5., 9., 2., 6., 10., 3., 7., 11.]).unwrap();
        let draw = |n: &HostTensor| draw(&NoiseSource::Given(n.clone()), 1, 3, [2, 2], DType::F32).unwrap();
        assert_eq!(draw(&unpacked), draw(&packed));
        assert_eq!(draw(&packed)[0], packed);
    }

    #[test]
    fn one_generator_draws_the_noise_of_its_images_in_order() {
        let two = draw(&NoiseSource::Seed { seed: 5, rng: Rng::Cpu }, 2, 16, [1, 2], DType::F32).unwrap();
        let one = draw(&NoiseSource::Seed { seed: 5, rng: Rng::Cpu }, 1, 16, [1, 2], DType::F32).unwrap();
        assert_eq!(two[0], one[0]);
        assert_ne!(two[0], two[1]);
    }

    #[test]
    fn one_of_a_batch_gets_the_noise_it_had_in_the_batch() {
        for rng in [Rng::Cpu, Rng::CpuBf16, Rng::CpuF16, Rng::Cuda] {
            let all = draw(&NoiseSource::Seed { seed: 9, rng }, 3, 16, [1, 3], DType::F32).unwrap();
            for (index, one) in all.iter().enumerate() {
                let again = NoiseSource::OneOfBatch { seed: 9, rng, index, batch: 3 };
                assert_eq!(draw(&again, 1, 16, [1, 3], DType::F32).unwrap(), std::slice::from_ref(one));
            }
        }
        let outside = NoiseSource::OneOfBatch { seed: 9, rng: Rng::Cpu, index: 3, batch: 3 };
        assert!(draw(&outside, 1, 16, [1, 3], DType::F32).is_err());
    }

    #[test]
    fn noise_of_another_size_is_refused() {
        let noise = NoiseSource::Given(HostTensor::zeros([1, 128, 4, 4]));
        let e = draw(&noise, 1, 128, [4, 6], DType::F32).unwrap_err().to_string();
        assert!(e.contains("[1, 128, 4, 4]") && e.contains("[1, 128, 4, 6]"), "{e}");
    }
}
