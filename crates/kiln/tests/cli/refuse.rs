//! Orders that can't be served: a clear word, the right exit code, and nothing written.

use std::fs;

use kiln_tensor::HostTensor;
use kiln_weights::save;

use crate::kit::{Kit, golden, pattern, png};

#[test]
fn an_order_that_is_not_whole_is_a_usage_error() {
    let kit = Kit::new();
    let model = kit.model().to_str().unwrap();
    kit.kiln(&[]).refused_by_help();
    kit.kiln(&["generate"]).refused(2, &["no prompt was given", "hint: "]);
    kit.kiln(&["generate", "-m", model]).refused(2, &["no prompt was given"]);
    let mask = golden("inputs/mask_100x72.png");
    kit.generate(&["fox", "--mask", &mask]).refused(2, &["--mask needs --init"]);
    kit.generate(&["fox", "--strength", "0.5"]).refused(2, &["--strength needs --init"]);
    kit.generate(&["fox", "--init", &mask, "--mask-padding", "8"])
        .refused(2, &["--mask-padding needs --mask"]);
    kit.generate(&["fox", "--rho", "2"]).refused(2, &["--rho goes with --schedule power"]);
    kit.generate(&["fox", "--json", "-o", "-"]).refused(2, &["standard output"]);
    kit.generate(&["fox", "-b", "2", "-o", "-"]).refused(2, &["2 pictures", "standard output"]);
    kit.generate(&["-", "-"]).refused(2, &["one prompt only"]);
    kit.generate(&["fox", "hen", "-S", "1,2,3"]).refused(2, &["3 seeds were given for 2 images"]);
    kit.generate(&["fox", "--noise", "n", "-S", "1"]).refused(2, &["cannot be used with"]);
    kit.generate(&["fox", "--embeds", "e"]).refused(2, &["cannot be used with"]);
    kit.generate(&["--embeds", "e", "-n", "blurry"]).refused(2, &["--negative and --embeds"]);
    assert!(kit.names().is_empty());
}

#[cfg(not(feature = "ember"))]
#[test]
fn without_a_model_inside_one_has_to_be_named() {
    let kit = Kit::new();
    let models = kit.path("data/kiln/models").display().to_string();
    kit.kiln(&["generate", "fox"]).refused(2, &["no model was given", "-m", "diffusers", &models]);
    kit.kiln(&["generate", "fox", "-m", "ember"])
        .refused(1, &["`ember` does not exist", "the feature `ember`"]);
}

impl crate::kit::Ran {
    /// Without a command there is nothing to say but how to use it.
    fn refused_by_help(self) {
        assert_eq!(self.code, 2);
        assert!(self.err.contains("Usage: kiln"), "{}", self.err);
    }
}

#[test]
fn values_out_of_range_are_refused() {
    let kit = Kit::new();
    for wrong in ["-1", "18446744073709551616", "x", "1.5"] {
        kit.generate(&["fox", &format!("-S={wrong}")]).refused(2, &["--seed"]);
    }
    kit.generate(&["fox", "-s", "0"]).refused(2, &["--steps", "at least 1"]);
    kit.generate(&["fox", "-b", "0"]).refused(2, &["--batch", "at least 1"]);
    kit.generate(&["fox", "-b", "1001"]).refused(1, &["1001 images are too many"]);
    kit.generate(&["fox", "-s", "10001"]).refused(1, &["10001 steps are too many"]);
    kit.generate(&["fox", "-W", "0"]).refused(2, &["--width", "at least 16"]);
    kit.generate(&["fox", "-H", "15"]).refused(2, &["--height", "at least 16"]);
    kit.generate(&["fox", "--threads", "0"]).refused(2, &["--threads", "1..=1024"]);
    kit.generate(&["fox", "--threads", "100000"]).refused(2, &["--threads", "1..=1024"]);
    kit.generate(&["fox", "--max-tokens=0"]).refused(2, &["--max-tokens"]);
    kit.generate(&["fox", "--sigmas", "0.5,0.9"]).refused(1, &["sigmas must fall"]);
    kit.generate(&["fox", "--sigmas", "2"]).refused(1, &["sigmas must be above 0 and at most 1"]);
    kit.generate(&["fox", "--schedule", "power", "--rho", "-1"]).refused(1, &["rho must be above 0"]);
    kit.generate(&["fox", "--schedule", "karras"]).refused(2, &["--schedule"]);
    kit.generate(&["fox", "-g", "-1"]).refused(1, &["guidance must be a number of at least 0"]);
    let init = golden("inputs/inpaint_100x72.png");
    kit.generate(&["fox", "--init", &init, "--strength", "1.5"])
        .refused(1, &["strength must lie between 0 and 1"]);
    kit.generate(&["fox", "--init", &init, "--strength", "0"]).refused(1, &["leaves none of the 2 steps"]);
    assert!(kit.names().is_empty());
}

#[test]
fn a_negative_number_is_a_value_out_of_range_and_no_option() {
    let kit = Kit::new();
    let init = golden("inputs/inpaint_100x72.png");
    let wrong = [
        (["-W", "-5"], 2, "at least 16"),
        (["-H", "-5"], 2, "at least 16"),
        (["-s", "-5"], 2, "at least 1"),
        (["-b", "-5"], 2, "at least 1"),
        (["-S", "-5"], 2, "from 0 to 18446744073709551615"),
        (["--threads", "-5"], 2, "1..=1024"),
        (["--max-tokens", "-5"], 2, "1..=32768"),
        (["--mask-padding", "-5"], 2, "0..="),
        (["-g", "-5"], 1, "at least 0"),
        (["--strength", "-5"], 1, "between 0 and 1"),
        (["--sigmas", "-5"], 1, "above 0"),
    ];
    for (option, code, words) in wrong {
        let ran = kit.generate(&[&["fox", "--init", &init], &option[..]].concat());
        assert!(!ran.err.contains("tip:") && !ran.err.contains("-- -5"), "{}", ran.err);
        ran.refused(code, &[words]);
    }
}

#[cfg(unix)]
#[test]
fn an_endless_prompt_is_refused() {
    let kit = Kit::new();
    let mut command = kit.command(&["generate", "-", "-m", kit.model().to_str().unwrap()]);
    let output = command.stdin(fs::File::open("/dev/zero").unwrap()).output().unwrap();
    crate::kit::Ran::from(output).refused(1, &["standard input", "longer than 1.0 MiB", "hint: "]);
}

#[test]
fn absurd_sizes_are_refused_with_the_memory_they_need() {
    let kit = Kit::new();
    let ran = kit.generate(&["fox", "-W", "500000", "-H", "500000"]);
    ran.refused(1, &["500000×500000 needs about", "GiB", "hint: choose a smaller size"]);
    let ran = kit.generate(&["fox", "-W", "99999999999999"]);
    ran.refused(2, &["--width", "at most 4294967295"]);
    assert!(kit.names().is_empty());
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    let kit = Kit::new();
    // No machine has that many, and most have no driver either.
    kit.generate(&["fox", "--device", "cuda:99"]).refused(1, &["cuda:99 can't be used", "hint: "]);
    kit.generate(&["fox", "--vram-limit", "much"]).refused(2, &["`much` is no size such as"]);
    kit.generate(&["fox", "--device", "tpu"]).refused(2, &["expected auto, cpu, cuda or cuda:N"]);
}

#[test]
fn pictures_that_can_not_be_used_are_named() {
    let kit = Kit::new();
    kit.write("small.png", &png(&pattern(63, 80)));
    kit.write("thin.png", &png(&pattern(64, 513)));
    kit.write("text.png", b"this is not a picture");
    kit.write("half.png", &png(&pattern(64, 64))[..2000]);
    kit.write("bomb.png", &bomb(60000));
    kit.write("claim.png", &bomb(i32::MAX as u32));
    kit.write("html.png", b"<!doctype html>");
    kit.write("black.png", &png(&kiln_image::Picture::black(100, 72)));
    let init = golden("inputs/inpaint_100x72.png");
    let refused = |args: &[&str], words: &[&str]| {
        kit.generate(&[&["fox", "-o", "out.png"], args].concat()).refused(1, words);
    };
    refused(&["-r", "none.png"], &["none.png", "reference image", "hint: "]);
    refused(&["-r", "small.png"], &["small.png", "63x80", "at least 64 px", "hint: "]);
    refused(&["-r", "thin.png"], &["thin.png", "64x513", "8 times", "hint: "]);
    refused(&["-r", "text.png"], &["text.png", "expected PNG", "found text", "hint: "]);
    refused(&["-r", "half.png"], &["half.png", "damaged"]);
    refused(&["-r", "bomb.png"], &["bomb.png", "too large", "60000x60000"]);
    refused(&["-r", "claim.png"], &["claim.png", "2147483647x2147483647", "at most 16384x16384", "hint: "]);
    refused(&["--from", "html.png"], &["`html.png` is not a picture", "found HTML", "hint: "]);
    refused(&["--from", "half.png"], &["`half.png` is damaged", "hint: "]);
    refused(&["-r", "."], &["can't read picture `.`"]);
    refused(&["--init", "text.png"], &["text.png", "image to start from"]);
    refused(&["--init", &init, "--mask", "half.png"], &["half.png", "mask"]);
    refused(&["--init", &init, "--mask", "black.png", "--mask-padding", "4"], &["black everywhere"]);
    assert!(!kit.names().contains(&"out.png".into()));
}

/// A few bytes that say they are a picture with such sides.
fn bomb(side: u32) -> Vec<u8> {
    let mut header = b"IHDR".to_vec();
    header.extend(side.to_be_bytes());
    header.extend(side.to_be_bytes());
    header.extend([8, 2, 0, 0, 0]);
    let mut crc = !0u32;
    for byte in &header {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
    file.extend(header);
    file.extend((!crc).to_be_bytes());
    // Data that is empty, with its checksum: readers look for it before they tell the size.
    file.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e");
    file
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let kit = Kit::new();
    let save = |name: &str, tensors: &[(&str, HostTensor)]| {
        save::save(kit.path(name), tensors, &Default::default()).unwrap();
    };
    save("noise.safetensors", &[("noise", HostTensor::zeros([1, 128, 4, 6]))]);
    save("embeds.safetensors", &[("prompt_embeds", HostTensor::zeros([1, 8, 7]))]);
    save("two.safetensors", &[("a", HostTensor::zeros([1])), ("b", HostTensor::zeros([1]))]);
    kit.write("text.safetensors", b"nothing of the kind");
    kit.generate(&["fox", "--noise", "noise.safetensors"])
        .refused(1, &["noise.safetensors", "[1, 128, 4, 6]", "[1, 128, 4, 4]", "hint: "]);
    kit.generate(&["fox", "--noise", "two.safetensors"])
        .refused(1, &["no tensor `noise` or `latents`", "`a`, `b`"]);
    kit.generate(&["fox", "--noise", "none.safetensors"]).refused(1, &["none.safetensors"]);
    kit.generate(&["fox", "--noise", "text.safetensors"])
        .refused(1, &["text.safetensors", "not a valid safetensors"]);
    kit.generate(&["--embeds", "embeds.safetensors"])
        .refused(1, &["embeds.safetensors", "[8, 7]", "[tokens, 48]", "hint: "]);
    save("none.safetensors", &[("prompt_embeds", HostTensor::zeros([1, 0, 48]))]);
    kit.generate(&["--embeds", "none.safetensors"]).refused(1, &["none.safetensors", "[0, 48]", "hint: "]);
    // As many values as there must be, in the wrong order.
    save("turned.safetensors", &[("noise", HostTensor::zeros([4, 4, 1, 128]))]);
    kit.generate(&["fox", "--noise", "turned.safetensors"])
        .refused(1, &["turned.safetensors", "[4, 4, 1, 128]", "[1, 16, 128]", "hint: "]);
    let mut values = vec![0.0; 16 * 128];
    values[7] = f32::NAN;
    save("nan.safetensors", &[("noise", HostTensor::from_f32([1, 16, 128], values).unwrap())]);
    kit.generate(&["fox", "--noise", "nan.safetensors"])
        .refused(1, &["nan.safetensors", "NaN", "at 7", "hint: "]);
    save(
        "inf.safetensors",
        &[("prompt_embeds", HostTensor::from_f32([1, 48], vec![f32::INFINITY; 48]).unwrap())],
    );
    kit.generate(&["--embeds", "inf.safetensors"]).refused(1, &["inf.safetensors", "inf among", "hint: "]);
}

#[test]
fn an_output_that_can_not_be_written_is_found_before_the_work() {
    let kit = Kit::new();
    fs::create_dir(kit.path("folder.png")).unwrap();
    let refused = |args: &[&str], words: &[&str]| {
        let ran = kit.generate(&[&["fox"], args].concat());
        assert!(!ran.err.contains("load "), "the model was loaded first:\n{}", ran.err);
        ran.refused(1, words);
    };
    refused(&["-o", "no/where/a.png"], &["no/where", "no such folder", "hint: "]);
    refused(&["-o", "folder.png"], &["folder.png", "is a folder"]);
    refused(&["-o", "a.bmp"], &["a.bmp", ".png, .jpg, .jpeg or .webp", "found .bmp"]);
    refused(&["-o", "a"], &["found no extension"]);
    refused(&["-o", "a.png", "--latents-out", "no/l.safetensors"], &["no such folder"]);
    refused(&["-o", "a.png", "--latents-out", "folder.png"], &["folder.png"]);
    assert_eq!(kit.names(), ["folder.png"]);
}

#[cfg(unix)]
#[test]
fn a_read_only_file_is_not_replaced() {
    use std::os::unix::fs::PermissionsExt;
    let kit = Kit::new();
    kit.write("a.png", b"precious");
    fs::set_permissions(kit.path("a.png"), fs::Permissions::from_mode(0o444)).unwrap();
    kit.generate(&["fox", "-o", "a.png"]).refused(1, &["a.png", "read-only"]);
    assert_eq!(fs::read(kit.path("a.png")).unwrap(), b"precious");
}
