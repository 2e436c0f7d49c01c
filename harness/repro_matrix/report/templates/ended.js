document.dispatchEvent(new Event("cells-are-there"));
