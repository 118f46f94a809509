//! Invalid requests: a clear message, the right exit code, and nothing written.

use std::fs;

use kiln_tensor::HostTensor;
use kiln_weights::save;

use crate::sandbox::{Sandbox, golden, pattern, png};

#[test]
fn an_incomplete_request_is_a_usage_error() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    sandbox.kiln(&["generate"]).fails(2, &["the prompt is missing", "hint: "]);
    sandbox.kiln(&["generate", "-m", model]).fails(2, &["the prompt is missing"]);
    let mask = golden("inputs/mask_100x72.png");
    sandbox.generate(&["fox", "--mask", &mask]).fails(2, &["--mask needs --init"]);
    sandbox.generate(&["fox", "--strength", "0.5"]).fails(2, &["--strength needs --init"]);
    sandbox
        .generate(&["fox", "--init", &mask, "--mask-padding", "8"])
        .fails(2, &["--mask-padding needs --mask"]);
    sandbox.generate(&["fox", "--rho", "2"]).fails(2, &["--rho needs --schedule power"]);
    sandbox.generate(&["fox", "--json", "-o", "-"]).fails(2, &["standard output"]);
    sandbox.generate(&["fox", "-b", "2", "-o", "-"]).fails(2, &["standard output takes a single image"]);
    sandbox.generate(&["-", "-"]).fails(2, &["only one prompt"]);
    sandbox.generate(&["fox", "hen", "-S", "1,2,3"]).fails(2, &["found 3 values of --seed for 2 images"]);
    sandbox.generate(&["fox", "--noise", "n", "-S", "1"]).fails(2, &["cannot be used with"]);
    sandbox.generate(&["fox", "--embeds", "e"]).fails(2, &["cannot be used with"]);
    sandbox.generate(&["--embeds", "e", "-n", "blurry"]).fails(2, &["--negative and --embeds"]);
    assert!(sandbox.names().is_empty());
}

#[cfg(not(feature = "ember"))]
#[test]
fn without_a_built_in_model_one_must_be_given() {
    let sandbox = Sandbox::new();
    let models = sandbox.path("data/kiln/models").display().to_string();
    sandbox.kiln(&["generate", "fox"]).fails(2, &["no model given", "-m", "diffusers", &models]);
    sandbox
        .kiln(&["generate", "fox", "-m", "ember"])
        .fails(1, &["`ember` does not exist", "the feature `ember`"]);
}

#[test]
fn values_out_of_range_are_errors() {
    let sandbox = Sandbox::new();
    for wrong in ["-2", "18446744073709551616", "x", "1.5"] {
        sandbox.generate(&["fox", &format!("-S={wrong}")]).fails(2, &["--seed"]);
    }
    sandbox.generate(&["fox", "-s", "0"]).fails(2, &["--steps", "at least 1"]);
    sandbox.generate(&["fox", "-b", "0"]).fails(2, &["--batch", "at least 1"]);
    sandbox.generate(&["fox", "-b", "1001"]).fails(2, &["1001 images are too many"]);
    sandbox.generate(&["fox", "-s", "10001"]).fails(2, &["--steps must be between 1 and 10000"]);
    sandbox.generate(&["fox", "-W", "0"]).fails(2, &["--width", "at least 16"]);
    sandbox.generate(&["fox", "-H", "15"]).fails(2, &["--height", "at least 16"]);
    sandbox.generate(&["fox", "--threads", "0"]).fails(2, &["--threads", "1..=1024"]);
    sandbox.generate(&["fox", "--threads", "100000"]).fails(2, &["--threads", "1..=1024"]);
    sandbox.generate(&["fox", "--max-tokens=0"]).fails(2, &["--max-tokens"]);
    sandbox.generate(&["fox", "--sigmas", "0.5,0.9"]).fails(2, &["sigmas must be strictly decreasing"]);
    sandbox.generate(&["fox", "--sigmas", "2"]).fails(2, &["sigmas must be above 0 and at most 1"]);
    sandbox.generate(&["fox", "--schedule", "power", "--rho", "-1"]).fails(2, &["rho must be above 0"]);
    sandbox.generate(&["fox", "--schedule", "karras"]).fails(2, &["--schedule"]);
    sandbox.generate(&["fox", "-g", "-1"]).fails(2, &["guidance must be a number of at least 0"]);
    let init = golden("inputs/inpaint_100x72.png");
    sandbox
        .generate(&["fox", "--init", &init, "--strength", "1.5"])
        .fails(2, &["strength must be between 0 and 1"]);
    assert!(sandbox.names().is_empty());
}

#[test]
fn a_negative_number_is_a_value_not_an_option() {
    let sandbox = Sandbox::new();
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
        (["-g", "-5"], 2, "at least 0"),
        (["--strength", "-5"], 2, "between 0 and 1"),
        (["--sigmas", "-5"], 2, "above 0"),
    ];
    for command in [
        &["upscale", "a.png", "--steps", "-1"][..],
        &["train", "p", "-o", "a.safetensors", "--steps", "-1"],
        &["bench", "--repeat", "-1"],
    ] {
        let ran = sandbox.kiln(command);
        assert!(!ran.err.contains("unexpected argument") && !ran.err.contains("tip:"), "{}", ran.err);
        ran.fails(2, &["invalid value '-1' for '--"]);
    }
    for (option, code, words) in wrong {
        let ran = sandbox.generate(&[&["fox", "--init", &init], &option[..]].concat());
        assert!(!ran.err.contains("tip:") && !ran.err.contains("-- -5"), "{}", ran.err);
        ran.fails(code, &[words]);
    }
}

#[cfg(unix)]
#[test]
fn an_endless_prompt_is_an_error() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["generate", "-", "-m", sandbox.model().to_str().unwrap()]);
    let output = command.stdin(fs::File::open("/dev/zero").unwrap()).output().unwrap();
    crate::sandbox::RunOutput::from(output).fails(1, &["standard input", "longer than 1.0 MiB", "hint: "]);
}

#[test]
fn a_huge_size_is_an_error_with_the_memory_it_needs() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["fox", "-W", "500000", "-H", "500000"]);
    ran.fails(1, &["500000×500000 needs about", "GiB", "hint: use a smaller size"]);
    let ran = sandbox.generate(&["fox", "-W", "99999999999999"]);
    ran.fails(2, &["--width", "at most 4294967295"]);
    assert!(sandbox.names().is_empty());
}

#[test]
fn a_missing_device_is_an_error() {
    let sandbox = Sandbox::new();
    // No machine has that many GPUs.
    sandbox.generate(&["fox", "--device", "cuda:99"]).fails(1, &["can't use cuda:99", "hint: "]);
    sandbox.generate(&["fox", "--vram-limit", "much"]).fails(2, &["`much` is not a size such as"]);
    sandbox.generate(&["fox", "--device", "tpu"]).fails(2, &["expected auto, cpu, cuda or cuda:N"]);
}

#[test]
fn unusable_images_are_named() {
    let sandbox = Sandbox::new();
    sandbox.write("small.png", &png(&pattern(63, 80)));
    sandbox.write("thin.png", &png(&pattern(64, 513)));
    sandbox.write("text.png", b"this is not an image");
    sandbox.write("half.png", &png(&pattern(64, 64))[..2000]);
    sandbox.write("bomb.png", &bomb(60000));
    sandbox.write("claim.png", &bomb(i32::MAX as u32));
    sandbox.write("html.png", b"<!doctype html>");
    sandbox.write("a.avif", b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf");
    sandbox.write("a.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic");
    sandbox.write("black.png", &png(&kiln_image::RgbImage::black(100, 72)));
    let init = golden("inputs/inpaint_100x72.png");
    let fails = |args: &[&str], words: &[&str]| {
        sandbox.generate(&[&["fox", "-o", "out.png"], args].concat()).fails(1, words);
    };
    fails(&["-r", "none.png"], &["none.png", "reference image", "hint: "]);
    fails(&["-r", "small.png"], &["small.png", "63x80", "at least 64 px", "hint: "]);
    fails(&["-r", "thin.png"], &["thin.png", "64x513", "8 times", "hint: "]);
    fails(&["-r", "text.png"], &["text.png", "expected PNG", "found text", "hint: "]);
    fails(&["-r", "half.png"], &["half.png", "damaged"]);
    fails(&["-r", "a.avif"], &["a.avif", "found AVIF", "convert it to PNG", "`avifdec IN OUT.png`"]);
    fails(&["-r", "a.heic"], &["a.heic", "found HEIC", "convert it to PNG", "`heif-dec IN OUT.png`"]);
    fails(&["-r", "bomb.png"], &["bomb.png", "too large", "60000x60000"]);
    fails(&["-r", "claim.png"], &["claim.png", "2147483647x2147483647", "at most 16384x16384", "hint: "]);
    fails(&["--from", "html.png"], &["`html.png` is not an image", "found HTML", "hint: "]);
    fails(&["--from", "half.png"], &["`half.png` is damaged", "hint: "]);
    fails(&["-r", "."], &["can't read image `.`"]);
    fails(&["--init", "text.png"], &["text.png", "initial image"]);
    fails(&["--init", &init, "--mask", "half.png"], &["half.png", "mask"]);
    fails(&["--init", &init, "--mask", "black.png", "--mask-padding", "4"], &["black everywhere"]);
    assert!(!sandbox.names().contains(&"out.png".into()));
}

/// A tiny PNG file whose header claims these sides.
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
    // An empty data chunk with its checksum: decoders look for it before they report the size.
    file.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e");
    file
}

#[test]
fn unsuitable_tensors_are_named() {
    let sandbox = Sandbox::new();
    let save = |name: &str, tensors: &[(&str, HostTensor)]| {
        save::save(sandbox.path(name), tensors, &Default::default()).unwrap();
    };
    save("noise.safetensors", &[("noise", HostTensor::zeros([1, 128, 4, 6]))]);
    save("embeds.safetensors", &[("prompt_embeds", HostTensor::zeros([1, 8, 7]))]);
    save("two.safetensors", &[("a", HostTensor::zeros([1])), ("b", HostTensor::zeros([1]))]);
    sandbox.write("text.safetensors", b"nothing of the kind");
    sandbox
        .generate(&["fox", "--noise", "noise.safetensors"])
        .fails(1, &["noise.safetensors", "[1, 128, 4, 6]", "[1, 128, 4, 4]", "hint: "]);
    sandbox
        .generate(&["fox", "--noise", "two.safetensors"])
        .fails(1, &["no tensor `noise` or `latents`", "`a`, `b`"]);
    sandbox.generate(&["fox", "--noise", "none.safetensors"]).fails(1, &["none.safetensors"]);
    sandbox
        .generate(&["fox", "--noise", "text.safetensors"])
        .fails(1, &["text.safetensors", "not a valid safetensors"]);
    sandbox
        .generate(&["--embeds", "embeds.safetensors"])
        .fails(1, &["embeds.safetensors", "[8, 7]", "[tokens, 48]", "hint: "]);
    save("none.safetensors", &[("prompt_embeds", HostTensor::zeros([1, 0, 48]))]);
    sandbox.generate(&["--embeds", "none.safetensors"]).fails(1, &["none.safetensors", "[0, 48]", "hint: "]);
    // The right number of values, transposed.
    save("transposed.safetensors", &[("noise", HostTensor::zeros([4, 4, 1, 128]))]);
    sandbox
        .generate(&["fox", "--noise", "transposed.safetensors"])
        .fails(1, &["transposed.safetensors", "[4, 4, 1, 128]", "[1, 16, 128]", "hint: "]);
    let mut values = vec![0.0; 16 * 128];
    values[7] = f32::NAN;
    save("nan.safetensors", &[("noise", HostTensor::from_f32([1, 16, 128], values).unwrap())]);
    sandbox
        .generate(&["fox", "--noise", "nan.safetensors"])
        .fails(1, &["nan.safetensors", "NaN", "at index 7", "hint: "]);
    save(
        "inf.safetensors",
        &[("prompt_embeds", HostTensor::from_f32([1, 48], vec![f32::INFINITY; 48]).unwrap())],
    );
    sandbox.generate(&["--embeds", "inf.safetensors"]).fails(1, &["inf.safetensors", "inf among", "hint: "]);
}

#[test]
fn an_unwritable_output_is_an_error_before_loading() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("folder.png")).unwrap();
    let fails = |args: &[&str], words: &[&str]| {
        let ran = sandbox.generate(&[&["fox"], args].concat());
        assert!(!ran.err.contains("load "), "the model was loaded first:\n{}", ran.err);
        ran.fails(1, words);
    };
    sandbox.write("file", b"");
    fails(&["-o", "file/where/a.png"], &["file/where", "`file` is not a folder", "hint: "]);
    fails(&["-o", "folder.png"], &["folder.png", "is a folder"]);
    let unknown = |name: &str, words: &[&str]| sandbox.generate(&["fox", "-o", name]).fails(2, words);
    unknown("a.bmp", &["a.bmp", ".png, .jpg, .jpeg or .webp", "found .bmp"]);
    unknown("a", &["found no extension"]);
    fails(&["-o", "a.png", "--latents-out", "file/l.safetensors"], &["`file` is not a folder", "hint: "]);
    fails(&["-o", "a.png", "--latents-out", "folder.png"], &["folder.png"]);
    assert_eq!(sandbox.names(), ["file", "folder.png"]);
}

#[test]
fn a_format_that_can_not_hold_the_size_is_an_error_before_loading() {
    let sandbox = Sandbox::new();
    let fails = |args: &[&str], words: &[&str]| {
        let ran = sandbox.generate(&[&["fox"], args].concat());
        assert!(!ran.err.contains("load "), "the model was loaded first:\n{}", ran.err);
        ran.fails(2, &[words, &["hint: choose PNG"]].concat());
    };
    fails(&["-W", "16400", "-H", "16", "-o", "x.webp"], &["WebP", "at most 16384 pixels", "16400x16"]);
    fails(&["-W", "16384", "-H", "16", "-o", "x.webp", "--quality", "80"], &["at most 16383 pixels"]);
    fails(&["-H", "65536", "-W", "16", "-o", "x.jpg"], &["JPEG", "at most 65535 pixels", "16x65536"]);
    fails(&["-H", "65536", "-W", "16", "-b", "2", "-o", "{seed}.jpg"], &["at most 65535 pixels"]);
    // The size of the file counts, not that of the tiles.
    sandbox.write("wide.png", &png(&pattern(8192, 64)));
    let model = sandbox.model().to_str().unwrap();
    let upscale = ["upscale", "wide.png", "-m", model, "-p", "fox", "-o", "x.webp", "--quality", "80"];
    sandbox.kiln(&upscale).fails(2, &["WebP", "at most 16383 pixels", "16384x128", "hint: choose PNG"]);
    assert_eq!(sandbox.names(), ["wide.png"]);
}

/// A pipe without a writer would make the program wait forever, a device without an end read forever.
#[cfg(unix)]
#[test]
fn pipes_and_devices_are_refused_by_name() {
    let sandbox = Sandbox::new();
    let made = std::process::Command::new("mkfifo").arg(sandbox.path("p.png")).status().unwrap();
    assert!(made.success());
    fs::create_dir(sandbox.path("lists")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", sandbox.path("lists/animal.txt")).unwrap();
    sandbox.write("a.png", &png(&pattern(64, 64)));
    for file in ["p.png", "/dev/zero"] {
        for args in [
            &["info", file][..],
            &["generate", "fox", "-r", file],
            &["generate", "fox", "--init", file],
            &["generate", "fox", "--init", "a.png", "--mask", file],
            &["generate", "fox", "--lora", file],
            &["generate", "--from", file],
            &["generate", "--prompt-file", file],
            &["upscale", file],
            &["bench", "--synthetic", "tiny", "--lora", file],
        ] {
            sandbox.kiln(args).fails(1, &[file, "not a regular file", "hint: "]);
        }
        sandbox.kiln(&["generate", "fox", "-m", file]).fails(1, &[file, "hint: "]);
    }
    let ran = sandbox.kiln(&["generate", "a __animal__", "--wildcards", "lists"]);
    ran.fails(1, &["lists/animal.txt", "not a regular file", "hint: "]);
    // What the shell connects is no pipe with a name.
    let mut command = sandbox.command(&["info", "a.png"]);
    assert!(command.status().unwrap().success());
    let script = r#"exec "$0" generate fox -s 1 -W 16 -H 16 -r /dev/stdin -o b.png < a.png"#;
    let program = env!("CARGO_BIN_EXE_kiln");
    let mut shell = sandbox.command_of(std::path::Path::new("sh"), &["-c", script, program]);
    assert!(shell.status().unwrap().success());
}

#[test]
fn a_read_only_file_is_not_replaced() {
    let sandbox = Sandbox::new();
    sandbox.write("a.png", b"precious");
    let writable = fs::metadata(sandbox.path("a.png")).unwrap().permissions();
    let mut read_only = writable.clone();
    read_only.set_readonly(true);
    fs::set_permissions(sandbox.path("a.png"), read_only).unwrap();
    sandbox.generate(&["fox", "-o", "a.png"]).fails(1, &["a.png", "read-only"]);
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), b"precious");
    // Windows deletes no read-only file with its folder.
    fs::set_permissions(sandbox.path("a.png"), writable).unwrap();
}

#[cfg(windows)]
#[test]
fn names_that_windows_has_for_devices_are_refused_and_avoided() {
    let sandbox = Sandbox::new();
    for name in ["aux.png", "NUL.png", "com1.webp"] {
        sandbox.generate(&["fox", "-o", name]).fails(1, &[name, "reserves this name for a device", "-o"]);
    }
    sandbox.generate(&["fox", "-o", "fox:b.png"]).fails(1, &["fox:b.png", "can't contain", "-o"]);
    sandbox.generate(&["fox", "-r", "con.png"]).fails(1, &["con.png", "reserves this name", "hint: "]);
    sandbox.generate(&["aux", "-s", "1", "-o", "{prompt}.png"]).ok();
    assert_eq!(sandbox.names(), ["aux_.png"]);
}
