//! Compiles the kernels for the host, embeds those for devices and gives the shared library its
//! identity. The C header is not made here: see `src/ffi/header.rs`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Suffix of the SONAME, bumped when a program built against an older version would break.
/// CMakeLists.txt reads this line.
const ABI: u32 = 0;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    build_kernels();
    embed_device_kernels();
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    link_arg(&format!("-soname,libkvpages.so.{ABI}"));
    // Destructors of Rust thread-locals run on the engine's threads, also after a dlclose():
    // the code stays mapped.
    link_arg("-z,nodelete");
    // A missing symbol is an error here, not in the engine. A sanitizer's symbols are the
    // exception: they come with the executable.
    if env::var_os("CARGO_CFG_SANITIZE").is_none_or(|sanitizers| sanitizers.is_empty()) {
        link_arg("-z,defs");
    }
}

/// Compiles the bodies in `kernels/` for the host. They need no C++ run-time library, so that a C
/// program links to nothing new.
fn build_kernels() {
    println!("cargo::rerun-if-changed=kernels");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .opt_level(3)
        .warnings(true)
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        // The same bits everywhere, a device included.
        .flag("-ffp-contract=off")
        // Nobody asks for the exception flags, and without them loops become vectors.
        .flag("-fno-trapping-math")
        .flag("-fvisibility=hidden")
        .file("kernels/host.cc");
    if env::var("CARGO_CFG_SANITIZE").is_ok_and(|sanitizers| sanitizers.contains("address")) {
        build.flag_if_supported("-fsanitize=address");
    }
    build.compile("kvpages_kernels");
}

/// What [`embed_device_kernels`] looks at.
const IMAGE: &str = "KVPAGES_CUDA_IMAGE";
const ARCHS: &str = "KVPAGES_CUDA_ARCHS";
const NVCC: &str = "KVPAGES_NVCC";
const TOOLKITS: [&str; 3] = ["CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH"];

/// Puts the kernels for devices where `src/kernels/device.rs` embeds them from.
///
/// By default that is the PTX of the repository, which the driver compiles for its device when it
/// is first used: no build depends on a toolkit being there. With `KVPAGES_CUDA_ARCHS`, such as
/// `80;90`, nvcc compiles for these architectures, and PTX for others; `KVPAGES_CUDA_IMAGE` names a
/// file of anything that cuModuleLoadData takes.
fn embed_device_kernels() {
    for name in [IMAGE, ARCHS, NVCC].iter().chain(&TOOLKITS) {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let given = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let fatbin = out.join("kvpages.fatbin");
    let source = match (given(IMAGE), given(ARCHS)) {
        (Some(path), _) => {
            println!("cargo::rerun-if-changed={path}");
            PathBuf::from(path)
        }
        (None, Some(archs)) => {
            compile_fatbin(&archs, &fatbin);
            fatbin
        }
        (None, None) => PathBuf::from("kernels/prebuilt/kvpages.ptx"),
    };
    let mut image = fs::read(&source)
        .unwrap_or_else(|error| panic!("the kernels in {}: {error}", source.display()));
    // PTX is a C string to the driver; other images say how long they are.
    image.push(0);
    fs::write(out.join("kvpages.image"), image).expect("OUT_DIR can be written");
}

fn compile_fatbin(archs: &str, fatbin: &Path) {
    let nvcc = nvcc().unwrap_or_else(|| {
        panic!("{ARCHS} is set, but there is no nvcc in PATH; set {NVCC} to it, or unset {ARCHS}")
    });
    let mut command = Command::new(&nvcc);
    command.args(["-std=c++17", "-O3", "-fmad=false", "-fatbin"]);
    for arch in archs.split([',', ';']).filter(|arch| !arch.is_empty()) {
        // What CMAKE_CUDA_ARCHITECTURES says of an architecture besides its number.
        let arch = arch.trim_end_matches("-real").trim_end_matches("-virtual");
        if !arch.starts_with(|first: char| first.is_ascii_digit()) {
            panic!("{ARCHS}: {arch} is no number of an architecture; a list is 80;90");
        }
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    command.arg("-gencode=arch=compute_80,code=compute_80");
    command.arg("kernels/device.cu").arg("-o").arg(fatbin);
    let status = command.status();
    let status = status.unwrap_or_else(|error| panic!("{}: {error}", nvcc.display()));
    assert!(status.success(), "{} failed: {status}", nvcc.display());
}

fn nvcc() -> Option<PathBuf> {
    if let Some(nvcc) = env::var_os(NVCC) {
        return Some(PathBuf::from(nvcc));
    }
    let toolkits = TOOLKITS.iter().filter_map(env::var_os);
    let toolkits = toolkits.map(|root| PathBuf::from(root).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found = toolkits
        .chain(env::split_paths(&path))
        .map(|dir| dir.join("nvcc"));
    found.find(|nvcc| nvcc.is_file())
}

/// Passes an option to the linker of the cdylib, and of nothing else.
fn link_arg(option: &str) {
    println!("cargo::rustc-cdylib-link-arg=-Wl,{option}");
}
