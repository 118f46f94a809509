//! Image files in and out, against what Pillow gives.

mod common;
mod decode;
mod encode;
mod mutation;
mod prepare;
