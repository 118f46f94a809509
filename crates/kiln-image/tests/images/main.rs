//! Image files in and out, against what Pillow gives.

mod common;
mod decode;
mod encode;
mod hostile;
mod hostile_files;
mod mutation;
mod prepare;
