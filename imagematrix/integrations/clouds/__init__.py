"""What an image needs, for systems that choose the machine: `image_needs` for any, `runpod` for RunPod."""
